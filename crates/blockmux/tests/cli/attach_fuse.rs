//! `blockmux attach --via fuse`: volumes as files. Tests that need FUSE print a line that begins
//! with `skipped: ` and end if this machine lets nobody mount it.

use crate::control::{Controlled, LoopDevice, eventually};
use crate::daemon::Daemon;
use crate::privileges::is_root;
use crate::program::{BLOCKMUX, blockmux, has, succeed, text};
use rustix::process::Signal;
use std::fs::{self, File};
use std::io::{self, BufRead, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// Whether volumes can be mounted here; if not, prints that the test is skipped.
#[expect(clippy::print_stdout, reason = "a skipped test says why")]
fn has_fuse() -> bool {
    let output = blockmux(["attach", "--probe"]);
    let probed = text(&output.stdout);
    let fuse = probed.lines().find_map(|line| line.strip_prefix("fuse")).unwrap_or_default().trim();
    if fuse != "usable" {
        println!("skipped: {fuse}");
    }
    fuse == "usable"
}

/// A mounted volume. Its process is killed when dropped, and the dead mount removed.
struct Mounted {
    process: Daemon,
    file: PathBuf,
    has_ended: bool,
}

impl Mounted {
    fn attach(directory: &Path, args: &[&str]) -> Mounted {
        Mounted::attach_at(&directory.join("disks"), args)
    }

    fn attach_at(mount_point: &Path, args: &[&str]) -> Mounted {
        let mut command = Command::new(BLOCKMUX);
        command.args(["attach", "--via", "fuse", "--json", "--directory"]).arg(mount_point).args(args);
        Mounted::by(command, mount_point)
    }

    /// Attaches by a command that prints JSON.
    fn by(mut command: Command, mount_point: &Path) -> Mounted {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let process = Daemon::of_child(child);
        // Of several files, the first.
        let file = process.json["files"][0]["path"].as_str().or(process.json["device"].as_str());
        let file = PathBuf::from(file.unwrap());
        assert_eq!(process.json["via"], "fuse");
        assert!(file.starts_with(mount_point.canonicalize().unwrap()), "{}", file.display());
        Mounted { process, file, has_ended: false }
    }

    fn mount_point(&self) -> &Path {
        self.file.parent().unwrap()
    }

    fn open(&self) -> File {
        File::options().read(true).write(true).open(&self.file).unwrap()
    }

    /// Waits for the end of the process.
    fn wait(&mut self) -> ExitStatus {
        self.has_ended = true;
        self.process.wait()
    }

    /// Stops the process, which unmounts the volume and removes the mount point. Other tests start
    /// processes meanwhile, which have copies of open files and mounts for a moment.
    fn detach(self) {
        self.process.signal(Signal::TERM);
        self.wait_until_detached();
    }

    /// Waits for the end of a process that was stopped while the volume was in use.
    fn wait_until_detached(mut self) {
        assert!(self.wait().success());
        assert!(!self.mount_point().exists());
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if !self.has_ended {
            self.process.signal(Signal::KILL);
            self.wait();
        }
        let _ = blockmux([Path::new("attach"), Path::new("--forget"), self.mount_point()]);
    }
}

/// Bytes that differ between neighbours and between blocks.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8 ^ (at >> 9) as u8).collect()
}

fn image(directory: &Path, size: u64) -> String {
    let path = directory.join("disk.img");
    let file = File::options().write(true).create(true).truncate(false).open(&path).unwrap();
    file.set_len(size).unwrap();
    format!("file:{}", path.display())
}

#[test]
fn a_volume_is_a_file_that_is_read_and_written_at_any_place() {
    if !has_fuse() {
        return;
    }
    for volume in ["mem:16m", "mem:16m?block_size=4096"] {
        let directory = tempfile::tempdir().unwrap();
        let mounted = Mounted::attach(directory.path(), &[volume]);
        let found = fs::metadata(&mounted.file).unwrap();
        assert_eq!((found.len(), found.permissions().mode() & 0o777), (16 << 20, 0o644));
        assert_eq!(found.uid(), rustix::process::geteuid().as_raw());
        let names = fs::read_dir(mounted.mount_point()).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.collect::<Vec<_>>(), ["mem"]);
        let (file, mut content) = (mounted.open(), pattern(4 << 20));
        file.write_all_at(&content, 0).unwrap();
        for (offset, len) in [(1, 1), (4095, 2), (8192, 100), (12_000, 288), (16_001, 1_700_000)] {
            file.write_all_at(&vec![0xa5; len], offset as u64).unwrap();
            content[offset..offset + len].fill(0xa5);
        }
        succeed(Command::new("fallocate").args(["-p", "-o", "70001", "-l", "200000"]).arg(&mounted.file));
        content[70_001..270_001].fill(0);
        file.sync_all().unwrap();
        assert!(fs::read(&mounted.file).unwrap()[..content.len()] == content, "{volume}");
        let past = file.write_at(&[1; 10], (16 << 20) - 4).unwrap();
        assert_eq!(past, 4);
        assert_eq!(file.write_at(&[1; 10], 16 << 20).unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(file.set_len(0).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        // A program that would truncate the file writes the volume instead.
        fs::write(&mounted.file, b"abc").unwrap();
        assert_eq!(fs::metadata(&mounted.file).unwrap().len(), 16 << 20);
        drop(file);
        mounted.detach();
    }
}

#[test]
fn a_volume_that_is_read_only_is_a_file_that_is_read_only() {
    if !has_fuse() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mounted = Mounted::attach(directory.path(), &["mem:1m", "--read-only"]);
    let mode = fs::metadata(&mounted.file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o444);
    let error = File::options().write(true).open(&mounted.file).unwrap_err();
    assert!(matches!(error.kind(), io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied));
    assert_eq!(fs::read(&mounted.file).unwrap().len(), 1 << 20);
    mounted.detach();
}

#[test]
fn a_failed_write_and_a_failed_flush_are_errors_of_their_calls() {
    if !has_fuse() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mounted = Mounted::attach(directory.path(), &["fault:op=write,every=1:mem:1m"]);
    let error = mounted.open().write_at(&[1; 4096], 0).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(61), "{error}");
    drop(mounted);
    let directory = tempfile::tempdir().unwrap();
    let mounted = Mounted::attach(directory.path(), &["fault:op=flush,every=1:mem:1m"]);
    let file = mounted.open();
    file.write_all_at(&[1; 4096], 0).unwrap();
    assert_eq!(file.sync_data().unwrap_err().raw_os_error(), Some(61));
}

#[test]
fn a_file_that_is_open_stays_until_it_is_closed() {
    if !has_fuse() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut mounted = Mounted::attach(directory.path(), &["mem:1m"]);
    let file = mounted.open();
    mounted.process.signal(Signal::TERM);
    mounted.process.wait_for_line("is in use; close it first");
    file.write_all_at(b"still there", 0).unwrap();
    drop(file);
    mounted.wait_until_detached();
}

#[test]
fn a_second_signal_unmounts_a_file_that_is_open() {
    if !has_fuse() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut mounted = Mounted::attach(directory.path(), &["mem:1m"]);
    let file = mounted.open();
    mounted.process.signal(Signal::TERM);
    mounted.process.wait_for_line("is in use; close it first");
    mounted.process.signal(Signal::TERM);
    mounted.process.wait_for_line("removed by force");
    assert!(!mounted.wait().success());
    assert!(file.write_at(b"gone", 0).is_err());
    assert!(!mounted.mount_point().exists());
}

#[test]
fn unmounting_ends_the_process_without_an_error() {
    if !has_fuse() || !rustix::process::geteuid().is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut mounted = Mounted::attach(directory.path(), &["mem:1m"]);
    succeed(Command::new("umount").arg(mounted.mount_point()));
    assert!(mounted.wait().success());
    assert!(!mounted.mount_point().exists());
}

#[test]
fn the_mount_of_a_killed_process_is_replaced_or_removed() {
    if !has_fuse() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let volume = image(directory.path(), 1 << 20);
    let mut mounted = Mounted::attach(directory.path(), &[&volume]);
    mounted.open().write_all_at(b"kept", 4096).unwrap();
    let kill = |mounted: &mut Mounted| {
        mounted.process.signal(Signal::KILL);
        mounted.wait();
        assert!(File::open(&mounted.file).is_err());
    };
    kill(&mut mounted);
    let mut again = Mounted::attach(directory.path(), &[&volume]);
    let mut data = [0; 4];
    again.open().read_exact_at(&mut data, 4096).unwrap();
    assert_eq!(&data, b"kept");
    let output = blockmux([Path::new("attach"), Path::new("--forget"), again.mount_point()]);
    assert_eq!(output.status.code(), Some(2), "its process runs");
    kill(&mut again);
    let output = blockmux([Path::new("attach"), Path::new("--forget"), &again.file]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(fs::read_dir(again.mount_point()).unwrap().count(), 0);
}

#[test]
fn a_file_that_is_open_where_its_directory_is_not_mounted_is_served_until_it_is_closed() {
    if !has_fuse() || !rustix::process::geteuid().is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let volume = image(directory.path(), 1 << 20);
    let mut mounted = Mounted::attach(directory.path(), &[&volume]);
    let file = mounted.open();
    succeed(Command::new("umount").arg("-l").arg(mounted.mount_point()));
    mounted.process.signal(Signal::TERM);
    mounted.process.wait_for_line("is in use; close it first");
    file.write_all_at(b"still there", 0).unwrap();
    file.sync_all().unwrap();
    drop(file);
    assert!(mounted.wait().success());
    assert!(!mounted.mount_point().exists());
    assert!(fs::read(directory.path().join("disk.img")).unwrap().starts_with(b"still there"));
}

#[test]
fn a_bind_mount_of_the_file_keeps_it() {
    if !has_fuse() || !rustix::process::geteuid().is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut mounted = Mounted::attach(directory.path(), &["mem:1m"]);
    let bound = directory.path().join("bound");
    File::create(&bound).unwrap();
    succeed(Command::new("mount").arg("--bind").arg(&mounted.file).arg(&bound));
    mounted.process.signal(Signal::TERM);
    mounted.process.wait_for_line(&format!("is in use by the mount at {}", bound.display()));
    fs::write(&bound, b"still there").unwrap();
    succeed(Command::new("umount").arg(&bound));
    mounted.wait_until_detached();
}

#[test]
fn a_file_that_is_open_in_another_mount_namespace_is_served_until_it_is_closed() {
    if !has_fuse() || !rustix::process::geteuid().is_root() || !has("unshare") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut mounted = Mounted::attach(directory.path(), &["mem:1m"]);
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c"]);
    command.arg("exec 3<>\"$0\"; echo open; read -r line; echo \"$line\" >&3").arg(&mounted.file);
    let mut user = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    io::BufReader::new(user.stdout.take().unwrap()).read_line(&mut said).unwrap();
    mounted.process.signal(Signal::TERM);
    mounted.process.wait_for_line("is in use; close it first");
    user.stdin.take().unwrap().write_all(b"still there\n").unwrap();
    assert!(user.wait().unwrap().success(), "its write has failed");
    assert!(mounted.wait().success());
}

#[test]
fn a_file_system_that_the_kernel_was_told_to_end_ends_the_process() {
    if !has_fuse() || !rustix::process::geteuid().is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let connections = directory.path().join("connections");
    fs::create_dir(&connections).unwrap();
    let volume = image(directory.path(), 1 << 20);
    let mut mounted = Mounted::attach(directory.path(), &[&volume]);
    let file = mounted.open();
    file.write_all_at(b"written", 0).unwrap();
    let number = rustix::fs::minor(fs::metadata(mounted.mount_point()).unwrap().dev());
    succeed(Command::new("mount").args(["-t", "fusectl", "blockmux-test"]).arg(&connections));
    let aborted = fs::write(connections.join(number.to_string()).join("abort"), "1");
    succeed(Command::new("umount").arg(&connections));
    aborted.unwrap();
    assert!(mounted.wait().success());
    assert!(file.write_at(b"gone", 0).is_err() && !mounted.mount_point().exists());
    assert!(fs::read(directory.path().join("disk.img")).unwrap().starts_with(b"written"));
}

/// A file system in RAM. It is unmounted when dropped.
struct RamMount(PathBuf);

impl RamMount {
    fn at(place: &Path) -> RamMount {
        succeed(Command::new("mount").args(["-t", "tmpfs", "blockmux-test"]).arg(place));
        RamMount(place.to_owned())
    }

    fn is_mounted(&self) -> bool {
        Command::new("mountpoint").arg("-q").arg(&self.0).status().unwrap().success()
    }
}

impl Drop for RamMount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn what_is_unmounted_is_the_volume_wherever_its_path_leads_by_now() {
    if !has_fuse() || !rustix::process::geteuid().is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let place = |name| directory.path().join(name);
    let mut mounted = Mounted::attach_at(&place("above/disks"), &["mem:1m"]);
    mounted.open().write_all_at(b"data", 0).unwrap();
    fs::create_dir_all(place("other/disks")).unwrap();
    let others = RamMount::at(&place("other/disks"));
    fs::rename(place("above"), place("moved")).unwrap();
    symlink(place("other"), place("above")).unwrap();
    mounted.process.signal(Signal::TERM);
    assert!(mounted.wait().success());
    assert!(others.is_mounted() && !place("moved/disks").exists());
}

#[test]
fn a_mount_over_the_volume_stays_and_so_does_the_volume() {
    if !has_fuse() || !rustix::process::geteuid().is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut mounted = Mounted::attach(directory.path(), &["mem:1m"]);
    let over = RamMount::at(mounted.mount_point());
    mounted.process.signal(Signal::TERM);
    mounted.process.wait_for_line("is in use by a mount that was moved, or is covered by another one");
    assert!(over.is_mounted());
    drop(over);
    mounted.wait_until_detached();
}

#[test]
fn a_directory_that_others_can_exchange_is_no_place_for_a_volume() {
    if !has_fuse() || !rustix::process::geteuid().is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let place = |name| directory.path().join(name);
    fs::create_dir_all(place("home")).unwrap();
    fs::create_dir_all(place("victim/disks")).unwrap();
    for (link, target) in [("home/last", "victim/disks"), ("home/above", "victim")] {
        symlink(place(target), place(link)).unwrap();
        lchown(place(link), Some(NOBODY), Some(NOBODY)).unwrap();
    }
    for (path, why) in [
        ("home/last", "it is a symbolic link, which is not followed; name another directory"),
        ("home/above/disks", "root does not follow a link of another user"),
        ("home/above/new", "root does not follow a link of another user"),
    ] {
        let path = place(path).display().to_string();
        let output = blockmux(["attach", "mem:1m", "--directory", &path, "--run", "true"]);
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(why), "{path}: {said}");
    }
    let left = fs::read_dir(place("victim")).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["disks"]);
}

#[test]
fn the_name_of_a_dead_mount_may_have_any_characters() {
    if !has_fuse() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("two\nlines\tand # a tab");
    for _ in 0..2 {
        let mut mounted = Mounted::attach_at(&place, &["mem:1m"]);
        mounted.process.signal(Signal::KILL);
        mounted.wait();
        assert!(fs::read_dir(&place).is_err());
        // The second one clears what the first has left.
        std::mem::forget(mounted);
    }
    let output = blockmux([Path::new("attach"), Path::new("--forget"), &place]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(fs::read_dir(&place).unwrap().count(), 0);
}

#[test]
fn the_mount_of_a_stopped_process_is_neither_waited_for_nor_removed() {
    if !has_fuse() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mounted = Mounted::attach(directory.path(), &["mem:1m"]);
    mounted.process.stop();
    let place = mounted.mount_point().display().to_string();
    let file = mounted.file.display().to_string();
    for (args, why) in [
        (["attach", "mem:1m", "--directory", &place].as_slice(), "is a mount point already"),
        (&["attach", "--forget", &place], "its process runs"),
        (&["attach", "--forget", &file], "its process runs"),
    ] {
        let output = Command::new("timeout").args(["60", BLOCKMUX]).args(args).output().unwrap();
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(why), "{args:?}: {said}");
    }
    mounted.process.signal(Signal::CONT);
    mounted.detach();
}

/// Begins to attach a volume that does not answer; returns once the process waits for it.
fn begin_to_attach(mount_point: &Path) -> Child {
    let mut command = Command::new(BLOCKMUX);
    command.args(["attach", "delay:1h:mem:1m", "--directory"]).arg(mount_point);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let is_read = |id: u32| {
        let tasks = fs::read_dir(format!("/proc/{id}/task")).unwrap();
        let children =
            tasks.map(|task| fs::read_to_string(task.unwrap().path().join("children")).unwrap_or_default());
        children.filter(|children| !children.is_empty()).count() > 0
    };
    while !is_read(child.id()) {
        assert!(child.try_wait().unwrap().is_none());
        std::thread::yield_now();
    }
    child
}

#[test]
fn a_signal_ends_a_process_that_waits_for_its_volume() {
    if !has_fuse() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mount_point = directory.path().join("disks");
    let child = begin_to_attach(&mount_point);
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("before it was attached"), "{said}");
    assert!(!mount_point.exists());
}

#[test]
fn a_process_that_is_killed_while_it_waits_for_its_volume_leaves_a_dead_mount() {
    if !has_fuse() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mount_point = directory.path().join("disks");
    let mut child = begin_to_attach(&mount_point);
    child.kill().unwrap();
    child.wait().unwrap();
    let output = blockmux([Path::new("attach"), Path::new("--forget"), &mount_point]);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

/// The user and group `nobody`.
const NOBODY: u32 = 65_534;

/// Whether this process may lock memory and is heard by the OOM killer.
fn may_keep_memory() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    // CAP_IPC_LOCK and CAP_SYS_RESOURCE.
    let needed = 1 << 14 | 1 << 24;
    u64::from_str_radix(effective.trim(), 16).unwrap() & needed == needed
}

#[test]
fn the_memory_of_the_process_is_kept_and_that_of_its_command_is_not() {
    if !has_fuse() || !may_keep_memory() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mounted = Mounted::attach(directory.path(), &["mem:1m"]);
    let of = |file: &str| fs::read_to_string(format!("/proc/{}/{file}", mounted.process.pid())).unwrap();
    assert_eq!(of("oom_score_adj").trim(), "-1000");
    let status = of("status");
    let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
    assert_ne!(locked.trim(), "0 kB");
    mounted.detach();
    let place = directory.path().join("disks").display().to_string();
    let output =
        blockmux(["attach", "mem:1m", "--directory", &place, "--run", "cat /proc/self/oom_score_adj"]);
    assert_eq!(text(&output.stdout), fs::read_to_string("/proc/self/oom_score_adj").unwrap());
}

#[test]
fn a_directory_that_is_in_use_is_refused() {
    if !has_fuse() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mounted = Mounted::attach(directory.path(), &["mem:1m"]);
    let mount_point = mounted.mount_point().display().to_string();
    let refused = |place: &str| {
        let output = blockmux(["attach", "null:1m", "--directory", place]);
        assert_eq!(output.status.code(), Some(2));
        text(&output.stderr)
    };
    let said = refused(&mount_point);
    assert!(said.contains("is a mount point already; name another directory with --directory"), "{said}");
    let said = refused("/proc/version/x");
    assert!(said.contains("name another directory with --directory"), "{said}");
    mounted.detach();
    let files = directory.path().join("files");
    fs::create_dir(&files).unwrap();
    fs::write(files.join("a"), "").unwrap();
    let said = refused(&files.display().to_string());
    assert!(said.contains("it has files, which would be hidden; name another directory"), "{said}");
    assert!(files.join("a").exists());
}

#[test]
fn the_command_of_run_has_the_file_and_its_status_is_returned() {
    if !has_fuse() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mount_point = directory.path().join("disks");
    let place = mount_point.display().to_string();
    let run = |command| blockmux(["attach", "mem:1m", "--directory", &place, "--run", command]);
    let output = run("wc -c < $device; exit 7");
    assert_eq!((text(&output.stdout).trim(), output.status.code()), ("1048576", Some(7)));
    assert!(!mount_point.exists());
}

#[test]
fn several_volumes_are_files_of_one_directory() {
    if !has_fuse() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let volume = image(directory.path(), 1 << 20);
    let mounted = Mounted::attach(directory.path(), &[&volume, "mem:2m", "delay:1us:null:3m", "--read-only"]);
    let files = mounted.process.json["files"].as_array().unwrap();
    let sizes = files.iter().map(|file| {
        let path = Path::new(file["path"].as_str().unwrap());
        assert_eq!(file["size"], fs::metadata(path).unwrap().len());
        (path.file_name().unwrap().to_str().unwrap(), file["size"].as_u64().unwrap() >> 20)
    });
    assert_eq!(sizes.collect::<Vec<_>>(), [("disk.img", 1), ("mem", 2), ("null", 3)]);
    mounted.detach();
    let mut mounted = Mounted::attach(directory.path(), &["mem:1m", &volume]);
    let other = mounted.mount_point().join("disk.img");
    fs::write(&mounted.file, pattern(9000)).unwrap();
    fs::write(&other, b"other").unwrap();
    assert!(fs::read(&mounted.file).unwrap()[..9000] == pattern(9000));
    let open = File::open(&other).unwrap();
    mounted.process.signal(Signal::TERM);
    mounted.process.wait_for_line(&format!("{} is in use; close it first", mounted.mount_point().display()));
    drop(open);
    mounted.wait_until_detached();
    assert_eq!(&fs::read(directory.path().join("disk.img")).unwrap()[..5], b"other");
    for (words, expected) in [
        (&["mem:1m", "null:1m", "--via", "fuse"][..], "name one with --directory"),
        (&["mem:1m", "mem:2m", "--directory", "/nowhere"][..], "has the name of its file, mem;"),
        (&["mem:1m", "null:1m", "--socket", "/nowhere/a"][..], "attach one at a time, or add --via fuse"),
        (&["mem:1m", "null:1m", "--directory", "/nowhere", "--name", "a"][..], "--name is for one volume"),
    ] {
        let output = blockmux([&["attach"], words].concat());
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(expected) && said.lines().count() == 1, "{said}");
    }
}

/// A file of a daemon, and the daemon; `None` if this machine or user has none.
fn file_of_daemon() -> Option<(Controlled, PathBuf)> {
    if !has_fuse() || !rustix::process::geteuid().is_root() {
        return None;
    }
    let controlled = Controlled::serve(&["a=mem:1m", "--keep-privileges"]);
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("blockmux-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let said = controlled.said(&["attach-disk", "a", "--via", "fuse", "--name", &name]);
    let file = PathBuf::from(said.split_whitespace().next().unwrap());
    assert_eq!(file.file_name().unwrap().to_str(), Some(name.as_str()));
    Some((controlled, file))
}

/// Processes that other tests start have copies of open files and mounts for a moment.
fn detach_disk(controlled: &Controlled) {
    eventually("nobody uses the disk", || controlled.ctl(&["detach-disk", "a"]).status.success());
}

#[test]
fn a_new_size_of_the_volume_is_that_of_its_file_and_of_a_loop_device() {
    let Some((controlled, file)) = file_of_daemon() else { return };
    let size = || fs::metadata(&file).unwrap().len();
    assert_eq!(size(), 1 << 20);
    let device = has("losetup").then(|| LoopDevice::over(&file, &["--direct-io=on"])).flatten();
    controlled.said(&["resize", "a", "3m"]);
    eventually("the file has the new size", || size() == 3 << 20);
    let opened = File::options().read(true).write(true).open(&file).unwrap();
    opened.write_all_at(b"beyond", 2 << 20).unwrap();
    drop(opened);
    if let Some(device) = device {
        succeed(Command::new("losetup").arg("--set-capacity").arg(&device.0));
        let sized = succeed(Command::new("blockdev").arg("--getsize64").arg(&device.0));
        assert_eq!(sized.trim(), (3 << 20).to_string());
        let mut bytes = [0; 6];
        File::open(&device.0).unwrap().read_exact_at(&mut bytes, 2 << 20).unwrap();
        assert_eq!(&bytes, b"beyond");
    }
    detach_disk(&controlled);
    assert!(!file.exists());
}

/// A command by a user without privileges; `None` if this machine lets us run none, which is
/// printed.
#[expect(clippy::print_stdout, reason = "a skipped test says why")]
fn by_nobody(program: &str) -> Option<Command> {
    if !rustix::process::geteuid().is_root() || !has("setpriv") {
        println!("skipped: only root becomes another user");
        return None;
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", program]);
    Some(command)
}

#[test]
fn other_users_read_the_file_only_if_that_is_allowed() {
    if !has_fuse() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    for (options, may_read) in [(&["mem:1m"][..], false), (&["mem:1m", "--allow-other"][..], true)] {
        let Some(mut read) = by_nobody("cat") else { return };
        let mounted = Mounted::attach(directory.path(), options);
        let output = read.arg(&mounted.file).output().unwrap();
        assert_eq!((output.status.success(), output.stdout.len()), (may_read, usize::from(may_read) << 20));
        let mut write = by_nobody("dd").unwrap();
        write.arg(format!("of={}", mounted.file.display())).args(["if=/dev/zero", "count=1", "conv=notrunc"]);
        assert!(!write.output().unwrap().status.success(), "its owner may");
        mounted.detach();
    }
}

#[test]
fn a_user_without_privileges_mounts_by_the_helper() {
    if !has_fuse() || !has("fusermount3") {
        return;
    }
    let Some(mut version) = by_nobody(BLOCKMUX) else { return };
    if !version.arg("--version").output().unwrap().status.success() {
        println!("skipped: another user cannot run {BLOCKMUX}");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o777)).unwrap();
    let mount_point = directory.path().join("disks");
    let mut command = by_nobody(BLOCKMUX).unwrap();
    command.args(["attach", "mem:1m", "--via", "fuse", "--json", "--directory"]).arg(&mount_point);
    let mut mounted = Mounted::by(command, &mount_point);
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let of_user = mounts.lines().find(|line| line.contains(&mount_point.display().to_string())).unwrap();
    assert!(of_user.contains("fuse.blockmux") && of_user.contains("user_id=65534"), "{of_user}");
    let mut commands = by_nobody("sh").unwrap();
    let script = "printf abc | dd of=\"$0\" conv=notrunc status=none && head -c 3 \"$0\"";
    assert_eq!(succeed(commands.args(["-c", script]).arg(&mounted.file)), "abc");
    assert!(fs::read(&mounted.file).is_err(), "nor root");
    mounted.process.signal(Signal::TERM);
    assert!(mounted.wait().success());
    assert!(!mount_point.exists());
}

#[test]
fn the_status_of_a_daemon_counts_the_io_of_its_files() {
    let Some((controlled, file)) = file_of_daemon() else { return };
    fs::write(&file, pattern(8192)).unwrap();
    let attachment = controlled.status()["attachments"][0].clone();
    assert_eq!((&attachment["via"], &attachment["written_bytes"]), (&"fuse".into(), &8192.into()));
    detach_disk(&controlled);
}

/// Files and devices have their own locks; a server may let any number of clients write.
#[test]
fn a_remote_volume_is_attached_for_writing_once_unless_it_is_shared_on_purpose() {
    if !has_fuse() {
        return;
    }
    let origin = Daemon::serve(&["mem:1m"]);
    let (url, directory) = (origin.url(), tempfile::tempdir().unwrap());
    let socket = directory.path().join("disk.sock").display().to_string();
    let beside = |more: &[&str]| {
        let output = blockmux([&["attach", &url, "--socket", &socket, "--run", "true"], more].concat());
        (output.status.code(), text(&output.stderr))
    };
    let mounted = Mounted::attach(directory.path(), &[&url]);
    let holder = format!("process {} ({})", mounted.process.pid().as_raw_nonzero(), mounted.file.display());
    // Another URL may refer to the same volume.
    for output in [
        blockmux(["attach", &url, "--socket", &socket]),
        blockmux(["attach", &format!("delay:1ms:{url}&reconnect=5s"), "--socket", &socket]),
        blockmux(["serve", &url, "--nbd", "127.0.0.1:0"]),
    ] {
        let said = text(&output.stderr);
        assert!(said.contains(&format!("{holder} already uses the same data")), "{said}");
        assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{said}");
    }
    for purpose in ["--read-only", "--shared"] {
        let (status, said) = beside(&[purpose]);
        assert_eq!(status, Some(0), "{said}");
    }
    mounted.detach();
    assert_eq!(beside(&[]).0, Some(0));
    let mut gateway = Daemon::serve(&[&url]);
    let output = blockmux(["attach", &url, "--via", "fuse"]);
    let said = text(&output.stderr);
    assert!(said.contains(&format!("process {} already uses", gateway.pid().as_raw_nonzero())), "{said}");
    assert!(said.contains("add --read-only, or --shared"), "{said}");
    // A process that was killed does not hold its volume any longer.
    gateway.signal(Signal::KILL);
    gateway.wait();
    Mounted::attach(directory.path(), &[&url]).detach();
}

#[test]
fn what_the_command_of_run_has_left_running_keeps_the_file_until_it_ends() {
    if !has_fuse() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (mount_point, fifo) = (directory.path().join("disks"), directory.path().join("fifo"));
    succeed(Command::new("mkfifo").arg(&fifo));
    let mut command = Command::new(BLOCKMUX);
    command.args(["attach", "mem:1m", "--directory"]).arg(&mount_point).env("FIFO", &fifo);
    command.args(["--run", "exec 3<$device; cat $FIFO & exit 7"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = io::BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let said = lines.find(|line| line.contains("is in use; close it first")).unwrap();
    assert!(said.contains("the disk is removed once that is done"), "{said}");
    fs::write(&fifo, "").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(7));
    assert!(!mount_point.exists());
    assert_eq!(lines.filter(|line| line.contains("is in use")).count(), 0, "it is told once");
}

/// File systems on loop devices on the file, which are as strict as those on a disk.
#[test]
fn file_systems_on_loop_devices_keep_their_files() {
    if !has_fuse() || !has("losetup") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("mnt");
    fs::create_dir(&place).unwrap();
    for (make, volume) in [("mkfs.xfs", "?block_size=4096"), ("mkfs.ext4", "")] {
        if !has(make) {
            continue;
        }
        let volume = image(directory.path(), 400 << 20) + volume;
        let mounted = Mounted::attach(directory.path(), &[&volume]);
        let Some(device) = LoopDevice::over(&mounted.file, &["--direct-io=on"]) else { return };
        succeed(Command::new(make).arg("-q").arg(&device.0));
        let mount = || succeed(Command::new("mount").arg(&device.0).arg(&place));
        let unmount = || succeed(Command::new("umount").arg(&place));
        mount();
        let files: Vec<Vec<u8>> = (0..40).map(|nth| pattern(nth * 54_321)).collect();
        for (nth, data) in files.iter().enumerate() {
            fs::write(place.join(nth.to_string()), data).unwrap();
        }
        fs::remove_file(place.join("7")).unwrap();
        succeed(Command::new("fstrim").arg(&place));
        unmount();
        mount();
        for (nth, data) in files.iter().enumerate().filter(|(nth, _)| *nth != 7) {
            assert!(fs::read(place.join(nth.to_string())).unwrap() == *data, "{make}: file {nth}");
        }
        unmount();
        drop(device);
        mounted.detach();
    }
}

#[test]
fn fio_verifies_its_writes_with_direct_io_and_in_shared_memory() {
    if !has_fuse() || !has("fio") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mounted = Mounted::attach(directory.path(), &[&image(directory.path(), 64 << 20)]);
    let file = format!("--filename={}", mounted.file.display());
    let direct = ["--direct=1", "--ioengine=libaio", "--iodepth=32", "--bsrange=512-128k", "--bs_unaligned"];
    let mut ways = vec![&direct[..]];
    if maps_shared() {
        ways.push(&["--ioengine=mmap", "--bs=4k"]);
    }
    for options in ways {
        let job = ["--name=verify", "--rw=randwrite", "--verify=crc32c", "--size=32m", "--io_size=8m"];
        succeed(Command::new("fio").current_dir(directory.path()).args(job).arg(&file).args(options));
    }
    mounted.detach();
}

/// Whether the kernel maps a file with direct I/O shared (Linux 6.6).
fn maps_shared() -> bool {
    let version = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = version.split(['.', '-']).map_while(|number| number.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
    version >= (6, 6)
}

#[test]
fn a_daemon_mounts_a_volume_only_if_it_keeps_its_privileges() {
    if !has_fuse() || !is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("a.toml");
    let name = format!("blockmux-test-{}", std::process::id());
    let attachment = format!("[[attachment]]\nvolume = 'a'\nvia = 'fuse'\nname = '{name}'\n");
    let listener = directory.path().join("n");
    let volume = format!("nbd = ['unix:{}']\n[[volume]]\nname = 'a'\nspec = 'mem:16m'\n", listener.display());
    fs::write(&config, format!("{volume}{attachment}")).unwrap();
    let refused = blockmux(["serve", "--config", config.to_str().unwrap()]);
    let said = text(&refused.stderr);
    assert!(
        refused.status.code() == Some(2)
            && said.contains("a.toml:5: attachment `a`: a serving daemon denies itself"),
        "{said}"
    );
    let said = Controlled::serve(&["a=mem:1m"]).refusal(&["attach-disk", "a", "--via", "fuse"]);
    assert!(said.contains("start it with --keep-privileges, or use `blockmux attach --via fuse`"), "{said}");

    let mut controlled = Controlled::serve(&["--config", config.to_str().unwrap(), "--keep-privileges"]);
    let attachment = |key: &str| controlled.status()["attachments"][0][key].clone();
    let path = PathBuf::from(attachment("device").as_str().unwrap());
    let file = File::options().read(true).write(true).open(&path).unwrap();
    file.write_all_at(&pattern(1 << 20), 0).unwrap();
    // The kernel splits the write at a page of the memory, where a block need not end.
    assert!(attachment("written_bytes").as_u64().unwrap() >= 1 << 20);
    if may_keep_memory() {
        let of = |file: &str| {
            fs::read_to_string(format!("/proc/{}/{file}", controlled.daemon.pid().as_raw_nonzero())).unwrap()
        };
        assert_eq!(of("oom_score_adj").trim(), "-1000");
        let status = of("status");
        let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
        assert_ne!(locked.trim(), "0 kB");
    }
    drop(file);
    controlled.daemon.signal(Signal::TERM);
    assert!(controlled.daemon.wait().success());
    assert!(!path.parent().unwrap().exists());
}
