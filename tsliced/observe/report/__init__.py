"""A report of a history: one HTML file that opens without a network.

`figures` works out what a timeline comes to, `verdict` says it in sentences, `drawing` makes the
data that the page draws, and `page` puts all of it together with what lies in `assets`.
"""
