"""Ways to show a report: a screen on a terminal, JSON, one HTML file, a PNG.

labels              words, colours and numbers as all of them print them
terminal, progress  the screen, and what is said before it is there
serial, schema      JSON and its schema
charts              drawings by matplotlib
html, png           pages of charts and tables
saving              a file by its suffix
"""
