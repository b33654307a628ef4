"""The embedded Postgres on disk: its user, its data folder, its binaries, its command line."""

from __future__ import annotations

import logging
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import psutil

from service.children import Account, end_survivors
from service.errors import ServerFailed, SettingError
from service.wheels import postgres_install

log = logging.getLogger(__name__)

ACCOUNT_NAME = "trunkline"  # as root: Postgres refuses to run as root
SERVER_ENVIRONMENT = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C", "TZ": "UTC"}
_INITDB_SECONDS = 120

_OPTIONS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "shared_buffers": "128MB",
    "max_connections": "200",
    "max_wal_size": "512MB",
    "checkpoint_completion_target": "0.9",
    "timezone": "UTC",
    "log_timezone": "UTC",
    # No statement and no parameter reaches the log: they hold prompts.
    "log_min_error_statement": "panic",
    "log_error_verbosity": "terse",
    "log_parameter_max_length": "0",
    "log_parameter_max_length_on_error": "0",
}


def server_account() -> Account | None:
    """As root, the dedicated user (made when missing); None for an ordinary user, who runs Postgres himself."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam(ACCOUNT_NAME)
    except KeyError:
        entry = _make_account()
    return Account(name=entry.pw_name, uid=entry.pw_uid, gid=entry.pw_gid)


def _make_account() -> pwd.struct_passwd:
    command = ["useradd", "--system", "--user-group", "--no-create-home", "--shell", "/usr/sbin/nologin", ACCOUNT_NAME]
    hint = f"make a system user named {ACCOUNT_NAME}, or set DATABASE_URL."
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={"PATH": "/usr/sbin:/sbin:/usr/bin:/bin"}
        )
        return pwd.getpwnam(ACCOUNT_NAME)
    except FileNotFoundError as error:
        raise ServerFailed(f"Postgres does not run as root and there is no useradd here: {hint}") from error
    except KeyError as error:
        said = done.stderr.strip()
        raise ServerFailed(f"Postgres does not run as root and useradd failed ({said}): {hint}") from error


def _folder(state_folder: Path) -> Path:
    return state_folder / "postgres"


def is_initialised(state_folder: Path) -> bool:
    """`data` appears whole or not at all, by a rename."""
    return (_folder(state_folder) / "data").exists()


def prepare_folder(state_folder: Path, account: Account | None) -> Path:
    """The data folder (perhaps not there yet), its parent owned by who runs Postgres. Raises SettingError."""
    folder = _folder(state_folder)
    folder.mkdir(mode=0o700, exist_ok=True)
    if account is not None:
        os.chown(folder, account.uid, account.gid)
        if not _can_run(["test", "-w", str(folder)], account):
            raise SettingError(
                f"TRUNKLINE_STATE: {state_folder} cannot be reached by the user {account.name}, as which Postgres "
                "runs; choose a folder below one that others may enter, such as /var/lib/trunkline."
            )
    return folder / "data"


def usable_install(state_folder: Path, account: Account | None) -> Path:
    """The wheel's Postgres, or a copy of it where `account` cannot read the wheel (a .venv below /root)."""
    install = postgres_install()
    if account is None or _can_run([str(install / "bin" / "initdb"), "--version"], account):
        return install
    stamp = f"{(install / 'bin' / 'postgres').stat().st_mtime_ns}"
    home = state_folder / f"postgres-software-{stamp}"
    copy = home / install.parent.name / install.name
    if not home.exists():
        _copy_install(install, home)
    if not _can_run([str(copy / "bin" / "initdb"), "--version"], account):
        raise ServerFailed(f"The user {account.name} cannot run {copy / 'bin' / 'initdb'}; check TRUNKLINE_STATE.")
    return copy


def _copy_install(install: Path, home: Path) -> None:
    """Keeps the wheel's layout: its binaries look for their libraries in ../../../<package>.libs."""
    package = install.parent
    draft = Path(tempfile.mkdtemp(prefix="postgres-software.", dir=home.parent))
    shutil.copytree(install, draft / package.name / install.name, symlinks=True)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, draft / libraries.name, symlinks=True)
    for path in (draft, *draft.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
        elif not path.is_symlink():
            path.chmod(0o755 if os.access(path, os.X_OK) and "bin" in path.parts else 0o644)
    draft.rename(home)


def _can_run(argv: list[str], account: Account) -> bool:
    """Ask the kernel rather than read mode bits: access lists and mounts count too."""
    try:
        done = subprocess.run(
            argv,
            user=account.uid,
            group=account.gid,
            extra_groups=[],
            capture_output=True,
            check=False,
            env=SERVER_ENVIRONMENT,
            cwd="/",
        )
    except OSError:
        return False
    return done.returncode == 0


def initialise(install: Path, data: Path, password: str, account: Account | None, *, durable: bool) -> None:
    """initdb into a draft folder, then rename: a kill in between leaves nothing half made."""
    draft = data.with_name("data.new")
    shutil.rmtree(draft, ignore_errors=True)
    secret = data.with_name("password")
    descriptor = os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        if account is not None:
            os.fchown(file.fileno(), account.uid, account.gid)
        file.write(password)
    argv = [str(install / "bin" / "initdb"), "--pgdata", str(draft), "--username", "trunkline"]
    argv += ["--auth", "scram-sha-256", "--pwfile", str(secret), "--encoding", "UTF8", "--locale", "C"]
    argv += [] if durable else ["--no-sync"]
    who = {} if account is None else {"user": account.uid, "group": account.gid, "extra_groups": []}
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            check=False,
            timeout=_INITDB_SECONDS,
            env=SERVER_ENVIRONMENT,
            cwd=data.parent,
            **who,  # type: ignore[call-overload]
        )
    finally:
        secret.unlink()
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise ServerFailed(f"initdb: {last}")
    draft.rename(data)


def postgres_argv(install: Path, data: Path, port: int, *, durable: bool) -> list[str]:
    """The server's command line. Raises ServerFailed where the data is of another major version."""
    have = (data / "PG_VERSION").read_text().strip()
    want = "".join(character for character in install.name if character.isdigit())
    if want and have != want:
        raise ServerFailed(f"{data} was made by Postgres {have}, the wheel holds {want}: dump and load it, or move it.")
    options = {**_OPTIONS, "port": str(port)}
    if not durable:
        options |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
    argv = [str(install / "bin" / "postgres"), "-D", str(data)]
    for name, value in options.items():
        argv += ["-c", f"{name}={value}"]
    return argv


def stop_predecessor(state_folder: Path) -> None:
    """After a kill -9 of our parent its Postgres may still be closing down, or its pid file name a stranger.

    Called under the lock of the state folder, so no living Trunkline owns what is found.
    """
    pid_file = _folder(state_folder) / "data" / "postmaster.pid"
    try:
        pid = int(pid_file.read_text().splitlines()[0])
        process = psutil.Process(pid)
        ours = process.name() == "postgres" and Path(process.cwd()) == pid_file.parent.resolve()
    except (FileNotFoundError, ValueError, IndexError, psutil.NoSuchProcess):
        return  # Postgres deals with a stale file itself
    if not ours:
        pid_file.unlink(missing_ok=True)  # a reused pid, which would make Postgres refuse to start
        return
    log.warning("ending the Postgres of a former run: pid=%d", pid)
    process.send_signal(signal.SIGINT)
    end_survivors([process], grace_seconds=20.0)
