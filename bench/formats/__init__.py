"""Effects of narrow formats on training: narrow formats of AdamW's state, and quantized gathers of weights."""
