"""Operate runs from outside: launch them, watch them, judge them, hand them over."""
