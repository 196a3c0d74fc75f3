"""Mixture of experts: who goes where, and the routed rows through their experts."""
