"""The live view in a terminal: a pure core (rows, view, keys), a drawing, and a thin shell."""
