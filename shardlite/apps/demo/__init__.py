"""A small GPT trained on real text over several ranks: an example of the library's use, and a measurement of it."""
