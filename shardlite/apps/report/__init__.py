"""`shardlite report`: one HTML page of the rows that benches have written.

In: files of rows, one JSON object per line. Out: a self-contained page with plots, tables, machines, versions and
commands. Read `rows.py` first, then `page.py`.

    rows.py      reads and groups rows     benches.json  questions of the known benches, and how to show their rows
    cells.py     numbers and keys as text  names.json    names of systems, words and units
    page.py      content of the page       page.html     template of the page
    plots.py     bars and lines            command.py    runs the command
"""
