"""Where a certificate and its private key are."""

from __future__ import annotations

import os


def certificate_files(path: str) -> tuple[str, str]:
    """Both in one file, or in a folder as a Secret of Kubernetes is mounted."""
    return (f"{path}/tls.crt", f"{path}/tls.key") if os.path.isdir(path) else (path, path)
