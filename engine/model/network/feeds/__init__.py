"""Feeds: the half of a layer that treats every token alone; one file each."""
