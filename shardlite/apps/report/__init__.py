"""`shardlite report`: one HTML page of the rows that benches have written.

In: files of rows, one JSON object a line. Out: a page with plots, tables, machines, versions and commands, which refers
to no other file. Read `rows.py` first, then `page.py`.

    rows.py      reading, and which rows belong together     benches.py  the questions that known benches answer
    cells.py     numbers, units and names as text            plots.py    plots as SVG, in the page's colours
    tables.py    facts and columns of one run                page.py     the page; its style is in style.css
    command.py   the options
"""
