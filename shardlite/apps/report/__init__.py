"""`shardlite report`: one HTML page of the rows that benches have written.

In: files of rows, one JSON object per line. Out: a page with plots, tables, machines, versions and commands, which
refers to no other file. Read `rows.py` first, then `page.py`.

    rows.py      reads and groups rows     benches.json  questions of the known benches, and how to show their rows
    cells.py     numbers and keys as text  names.json    names of systems, words and units
    page.py      what the page shows       page.html     its template
    plots.py     bars and lines            command.py    the options
"""
