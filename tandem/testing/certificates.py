"""A certificate authority for tests, made with the openssl command; its keys are worth nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tandem.config.tree import TlsConfig

_DAYS = "2"


class Authority:
    """Signs workers' certificates."""

    def __init__(self, folder: Path) -> None:
        """Make the authority's own certificate in ``folder``."""
        self._folder = folder
        self._certificate, self._key = folder / "ca.pem", folder / "ca.key"
        _openssl(
            *("req", "-x509", "-days", _DAYS, "-subj", f"/CN=authority in {folder.name}"),
            *_new_key(self._key),
            *("-out", self._certificate),
        )

    def config(self, name: str) -> TlsConfig:
        """Settings of a worker with a certificate of its own; the same for the same ``name``."""
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        if not certificate.exists():
            request = self._folder / f"{name}.csr"
            _openssl("req", "-subj", f"/CN={name}", *_new_key(key), "-out", request)
            _openssl(
                *("x509", "-req", "-days", _DAYS, "-in", request, "-out", certificate),
                *("-CA", self._certificate, "-CAkey", self._key, "-CAcreateserial"),
            )
        return TlsConfig(
            cert_file=str(certificate), key_file=str(key), ca_file=str(self._certificate)
        )


def _new_key(file: Path) -> list[str | Path]:
    curve = "ec_paramgen_curve:prime256v1"
    return ["-newkey", "ec", "-pkeyopt", curve, "-nodes", "-keyout", file]


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
