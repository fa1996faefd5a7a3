"""Training side by side: by ShardLite and in every other way, and what differs."""
