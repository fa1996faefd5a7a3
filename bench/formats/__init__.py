"""Effects of narrow formats on training: of AdamW's state, and of gathered weights."""
