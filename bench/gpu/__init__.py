"""The first hour on a GPU: `python -m bench.gpu --part N --out FOLDER` runs one of four parts (`run.py`)."""
