"""The dashboard: web pages about the runs of one MongoDB server.

It knows neither MongoDB nor torch: it reads through ``store``, and renders HTML on the server.
"""
