"""Sign a record with an ssh key, and find what has changed since; ssh-keygen does both.

    every file of the record ── size, sha256 ──> signed.json ── ssh-keygen -Y sign ──> signed.json.sig

The signature covers the bytes of signed.json, which lists every other file. A record that was
signed and then archived keeps both files, and is verified in the archive as in the folder.
"""

import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from areal_core.safety.durable import commit_file
from areal_core.safety.printable import printable
from recorder.checksum_json import MAX_JSON_BYTES, checksummed_bytes, parse_checksummed
from recorder.errors import BadSignature, RecordError
from recorder.format import (
    FORMAT_VERSION,
    IMAGES_FOLDER,
    SIGNATURE_FILE,
    SIGNED_FILE,
    UNFINISHED_FILES,
    SignedFile,
    parse_signed,
)
from recorder.pictures.shared import is_leftover
from recorder.reader import open_record, read_small
from recorder.storage import FolderStorage, Storage, file_blocks, walk
from recorder.verify import verify

NAMESPACE = "areal-debug-record"  # a signature made for another purpose is not accepted
PUBLIC_KEY = re.compile(r"(sk-)?(ssh|ecdsa)-[a-z0-9@.-]+ [A-Za-z0-9+/=]+( .*)?")
MAX_SIGNATURE_BYTES = 1 << 16
TIMEOUT_S = 60


@dataclass(frozen=True)
class Signed:
    """A signature that was verified: who signed, and what has changed since, sorted by path."""

    signer: str
    num_files: int
    changed: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]

    @property
    def unchanged(self) -> bool:
        """True if every file is as signed."""
        return not (self.changed or self.added or self.removed)


def sign_record(record: Path, key: Path) -> int:
    """Write the list of all files of a record, and its signature; return their number.

    Args:
        key: the private key, or the public key of one that ssh-agent holds.

    Raises:
        RecordError: there is no such key, ssh-keygen refuses, the record is an archive or damaged.
    """
    storage = open_record(record).storage
    if not isinstance(storage, FolderStorage):
        raise RecordError(f"{record} is an archive: extract it, sign the folder, and archive that")
    if not key.is_file():
        raise RecordError(f"{key} does not exist: give a private ssh key, which ssh-keygen -t ed25519 makes")
    if problems := verify(record).problems:
        raise RecordError(f"{record} is not signed, because {problems[0]}: `areal-debug record verify`")
    files = dict(signable_files(storage))
    document = {"format_version": FORMAT_VERSION, "files": {name: vars(file) for name, file in files.items()}}
    data = checksummed_bytes(document)
    try:
        signature = ssh_keygen(["-Y", "sign", "-n", NAMESPACE, "-f", str(key)], data)
    except SignatureRefused as refused:
        raise RecordError(f"ssh-keygen does not sign with {key}: {refused}") from None
    commit_file(record / SIGNED_FILE, data)
    commit_file(record / SIGNATURE_FILE, signature)
    return len(files)


def signable_files(storage: Storage) -> Iterator[tuple[str, SignedFile]]:
    for name in walk(storage, ""):
        unsigned = {SIGNED_FILE, SIGNATURE_FILE, *UNFINISHED_FILES}
        if name not in unsigned and not is_leftover(name.removeprefix(f"{IMAGES_FOLDER}/")):
            yield name, identity_of(storage, name)


def identity_of(storage: Storage, name: str) -> SignedFile:
    digest, size_bytes = hashlib.sha256(), 0
    for block in file_blocks(storage, name):
        digest.update(block)
        size_bytes += len(block)
    return SignedFile(size_bytes, digest.hexdigest())


def check_signature(storage: Storage, signed_by: str) -> Signed:
    """Verify the signature of a record, and compare every file with the signed list.

    Args:
        signed_by: a public key, a file with one, or an `allowed_signers` file of ssh-keygen.

    Raises:
        BadSignature: there is none, or it is not by this key, or not of this list.
    """
    return changes_since(storage, *signed_list(storage, signed_by))


def signed_list(storage: Storage, signed_by: str) -> tuple[str, bytes]:
    """Return who signed and the bytes of signed.json, whose signature is verified.

    Apart from `changes_since`, which reads all of a record and may be confined: ssh-keygen is a
    program, which a confined process cannot start. Raises BadSignature, RecordError.
    """
    for file in (SIGNED_FILE, SIGNATURE_FILE):
        if storage.size(file) is None:
            raise BadSignature(f"the record has no {file}: `areal-debug record sign` makes one")
    data = read_small(storage, SIGNED_FILE)
    signature = bytes(storage.read(SIGNATURE_FILE, 0, MAX_SIGNATURE_BYTES))
    return verify_signature(data, signature, signed_by), data


def changes_since(storage: Storage, signer: str, data: bytes) -> Signed:
    """Compare every file of a record with a signed.json. Raises DamagedRecord."""
    listed = parse_signed(parse_checksummed(data, SIGNED_FILE))
    found = dict(signable_files(storage))
    return Signed(
        signer=signer,
        num_files=len(listed),
        changed=tuple(sorted(name for name in listed.keys() & found.keys() if listed[name] != found[name])),
        added=tuple(sorted(found.keys() - listed.keys())),
        removed=tuple(sorted(listed.keys() - found.keys())),
    )


def verify_signature(data: bytes, signature: bytes, signed_by: str) -> str:
    """Return who signed the data, as ssh-keygen names it. Raises BadSignature, RecordError."""
    with tempfile.TemporaryDirectory(prefix="areal-debug-") as folder:
        allowed, file = Path(folder) / "allowed_signers", Path(folder) / "signature"
        allowed.write_text(allowed_signers(signed_by))
        file.write_bytes(signature)
        files = ["-f", str(allowed), "-s", str(file)]
        try:
            found = ssh_keygen(["-Y", "find-principals", *files], b"").decode().splitlines()
            name = found[0] if found else ""
            answer = ssh_keygen(["-Y", "verify", "-n", NAMESPACE, "-I", name, *files], data)
        except SignatureRefused as refused:
            raise BadSignature(f"the signature of the record is not by {signed_by}: {refused}") from None
    return printable(
        answer.decode(errors="replace").strip().removeprefix(f'Good "{NAMESPACE}" signature for ')
    )


def allowed_signers(signed_by: str) -> str:
    text = signed_by
    if not PUBLIC_KEY.fullmatch(text):
        file = Path(signed_by)
        if not file.is_file():
            raise RecordError(
                f"{signed_by} is neither a public ssh key nor a file: give the signer's .pub file"
            )
        with file.open("rb") as handle:
            text = handle.read(MAX_JSON_BYTES).decode(errors="replace").strip()
    if not PUBLIC_KEY.fullmatch(text):
        return text + "\n"
    kind, key, *comment = text.split(" ", 2)
    name = re.sub(r"[^A-Za-z0-9@._-]", "_", comment[0]) if comment else "the-given-key"
    return f'{name} namespaces="{NAMESPACE}" {kind} {key}\n'


class SignatureRefused(Exception):
    """ssh-keygen refused, with its reason."""


def ssh_keygen(arguments: list[str], data: bytes) -> bytes:
    """Run ssh-keygen on data; return its output.

    Raises:
        RecordError: it is not installed, or did not end.
        SignatureRefused: it failed.
    """
    if (program := shutil.which("ssh-keygen")) is None:
        raise RecordError("ssh-keygen is not installed, which signs records: install OpenSSH 8.2 or later")
    try:
        done = subprocess.run([program, *arguments], input=data, capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise RecordError(f"ssh-keygen did not end in {TIMEOUT_S} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        raise SignatureRefused(printable(lines[-1] if lines else f"exit code {done.returncode}"))
    return done.stdout
