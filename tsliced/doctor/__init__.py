"""`tslicectl doctor`: looks over a host, with or without a daemon, and says what to mend.

`findings` is what a check says; `host`, `devices`, `jobs` and `daemon` are the checks, each a
function of a few facts; `examination` collects the facts and runs the checks.
"""
