"""A signed record: who signed it, and each file that is not as it was signed."""

import json
import shutil
import subprocess

import pytest
from click.testing import CliRunner

from areal_debug.verbs.record import command
from recorder import RecordError, open_record, verify
from recorder.archive.extract import extract_record
from recorder.archive.pack import archive_record
from recorder.checksum_json import checksum
from recorder.errors import BadSignature
from recorder.integrity import signature
from recorder.integrity.signature import check_signature, sign_record
from recorder.testing import write_scripted_record

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Two keys of ed25519: alice's and bob's."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("alice", "bob"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"{name}@lab", "-f", folder / name],
            check=True,
        )
    return folder


@pytest.fixture
def signed(record, keys):
    assert sign_record(record, keys / "alice") == 2 + 6 * 4
    return record


def check(record, signed_by):
    return check_signature(open_record(record).storage, str(signed_by))


def run(*arguments):
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_a_signed_record_names_its_signer_and_stays_intact(signed, keys):
    found = check(signed, keys / "alice.pub")
    assert found.signer.startswith("alice@lab with ED25519 key SHA256:")
    assert (found.num_files, found.unchanged) == (26, True)
    assert verify(signed).intact


def test_the_key_may_be_given_as_text_or_in_a_file_of_allowed_signers(signed, keys, tmp_path):
    public = (keys / "alice.pub").read_text().strip()
    assert check(signed, public).signer.startswith("alice@lab with")
    kind, key, _ = public.split()
    (tmp_path / "allowed").write_text(f"# the lab\nalice@example.org {kind} {key}\n")
    assert check(signed, tmp_path / "allowed").signer.startswith("alice@example.org with")


def test_a_signature_by_another_key_is_refused(signed, keys):
    with pytest.raises(BadSignature, match=r"is not by .*bob.pub"):
        check(signed, keys / "bob.pub")
    result = run("verify", signed, "--signed-by", keys / "bob.pub")
    assert result.exit_code == 1
    assert "is not by" in result.output


def test_a_byte_changed_and_sealed_again_is_named(signed, keys, change):
    folder = signed / "steps/000005"
    file = folder / "batch-00000-of-00001.safetensors"
    entry = open_record(signed).step(5).manifest.batches[file.name].tensors["rewards"]
    data = bytearray(file.read_bytes())
    data[entry.offset + 3] ^= 0x40
    file.write_bytes(data)
    crc = checksum(data[entry.offset : entry.offset + entry.size_bytes])
    change(folder / "step.json", lambda s: s["batches"][file.name]["tensors"]["rewards"].update(crc32c=crc))
    link = signature.hashlib.sha256((folder / "step.json").read_bytes()).hexdigest()
    change(signed / "end.json", lambda end: end["last"].update(sha256=link))
    assert verify(signed).intact  # crc32c protects against accidents
    found = check(signed, keys / "alice.pub")
    assert found.changed == ("end.json", f"steps/000005/{file.name}", "steps/000005/step.json")
    assert (found.added, found.removed) == ((), ())


def test_files_added_and_removed_are_named_by_the_verb(signed, keys):
    (signed / "steps/000001/extra.txt").write_text("x")
    (signed / "end.json").unlink()
    result = run("verify", signed, "--signed-by", keys / "alice.pub")
    assert result.exit_code == 1
    assert "steps/000001/extra.txt: added since it was signed" in result.output
    assert "end.json: removed since it was signed" in result.output


def test_the_signature_of_another_record_is_found(signed, keys, tmp_path):
    write_scripted_record(tmp_path / "other", num_steps=1)
    for name in ("signed.json", "signed.json.sig"):
        shutil.copy(signed / name, tmp_path / "other" / name)
    found = check(tmp_path / "other", keys / "alice.pub")
    assert len(found.removed) == 20
    assert "end.json" in found.changed


def test_a_changed_list_is_refused(signed, keys, change):
    change(signed / "signed.json", lambda document: document["files"].pop("end.json"))
    with pytest.raises(BadSignature, match="is not by"):
        check(signed, keys / "alice.pub")


def test_a_signature_for_another_purpose_is_refused(signed, keys):
    data = (signed / "signed.json").read_bytes()
    made = signature.ssh_keygen(["-Y", "sign", "-n", "git", "-f", str(keys / "alice")], data)
    (signed / "signed.json.sig").write_bytes(made)
    with pytest.raises(BadSignature, match="is not by"):
        check(signed, keys / "alice.pub")


def test_an_archive_keeps_the_signature_and_is_verified_directly(signed, keys, tmp_path):
    archive_record(signed, tmp_path / "a.zip")
    result = run("verify", tmp_path / "a.zip", "--signed-by", keys / "alice.pub", "--json")
    facts = json.loads(result.output)
    assert (result.exit_code, facts["intact"], facts["signed"]["num_files"]) == (0, True, 26)
    extract_record(tmp_path / "a.zip", tmp_path / "again")
    assert check(tmp_path / "again", keys / "alice.pub").unchanged
    with pytest.raises(RecordError, match="is an archive: extract it, sign the folder"):
        sign_record(tmp_path / "a.zip", keys / "alice")


def test_what_cannot_be_signed_or_verified_is_one_sentence(record, keys, tmp_path, monkeypatch):
    result = run("verify", record, "--signed-by", keys / "alice.pub")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "has no signed.json: `areal-debug record sign` makes one" in result.stderr
    result = run("sign", record, "--key", tmp_path / "none")
    assert (result.exit_code, "none does not exist" in result.stderr) == (2, True)
    (tmp_path / "not_a_key").write_text("x")
    result = run("sign", record, "--key", tmp_path / "not_a_key")
    assert (result.exit_code, "ssh-keygen does not sign with" in result.stderr) == (2, True)
    result = run("verify", record, "--signed-by", "nobody")
    assert result.exit_code == 1
    (record / "steps/000000/step.json").unlink()
    assert run("sign", record, "--key", keys / "alice").exit_code == 2
    monkeypatch.setattr(signature.shutil, "which", lambda name: None)
    with pytest.raises(RecordError, match="ssh-keygen is not installed"):
        signature.ssh_keygen([], b"")
