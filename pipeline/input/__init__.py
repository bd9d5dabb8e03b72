"""Labelled images as rows with dense ids: layouts of files, discovery, the scan."""
