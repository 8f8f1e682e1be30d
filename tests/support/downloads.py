"""The environment of a program that downloads from the network."""

from __future__ import annotations

import os


def online() -> dict[str, str]:
    """Return this process's variables, with the certificate authorities that conftest.py keeps from the tests."""
    variables = dict(os.environ)
    own = variables.pop("OWN_SSL_CERT_FILE", "")
    variables.pop("SSL_CERT_FILE", None)
    return variables | ({"SSL_CERT_FILE": own} if own else {})
