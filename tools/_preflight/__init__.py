"""The check of a job's nodes before it trains: what each rank finds (`probes.py`), what links
between nodes and within axes carry (`links.py`), how it is gathered although a rank is stopped
(`meeting.py`), and which nodes are slow or wrong (`judge.py`). Called from tools/preflight.py.
"""
