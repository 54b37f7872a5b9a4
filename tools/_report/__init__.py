"""The pages of `tools/report.py`: one HTML file about one run or many, readable without a network.

`runs.py` reads what runs left behind, `curves.py` makes curves of it, `picture.py` draws them for
readers without JavaScript, `page.py` fills in `page.html`, `page.js` draws anew what a reader
switches.
"""
