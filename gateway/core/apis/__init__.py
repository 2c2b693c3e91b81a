"""How the answers of each API are read: a file each, whose functions tell `Seen` what an event or a whole answer says.

They raise what reading JSON raises where it is not shaped as their API's.
"""
