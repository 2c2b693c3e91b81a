"""Pages for people, under `/ui`: what the gateway has, and what its runs were. They show, and change nothing.

Made on the server by plain functions; no script, no asset but one stylesheet. What a client could choose (a session's
id, an identity, a model, a body) becomes HTML in `gateway.ui.html` alone, where all text is escaped.
"""
