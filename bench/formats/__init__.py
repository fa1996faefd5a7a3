"""What narrow formats change in a training: of the state of AdamW, and of gathered weights."""
