"""Optimizers that step whole parameters, compared with AdamW and with other libraries."""
