"""Presets beyond a paper's own, by (method, name): `--preset NAME` finds those whose method is config["recipes"],
so a copied method file finds them too. A preset holds only what differs from the method's config.
"""
presets = {}
