//! A guest's root file system in memory: programs of this machine with their libraries, modules of
//! the guest's kernel, and the scripts.

use super::kernel::Kernel;
use super::{rxe, siw};
use crate::process::{find, succeed};
use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Programs of the guest; busybox provides the usual ones.
pub(crate) const PROGRAMS: &[&str] = &[
    "busybox",
    "dash",
    "bash",
    "aoe-discover",
    "aoe-stat",
    "kmod",
    "iscsid",
    "iscsiadm",
    "nbd-client",
    "nvme",
    "mkfs.xfs",
    "xfs_repair",
    "mkfs.ext4",
    "e2fsck",
    "fio",
    "sg_reset",
    "sg_persist",
    "sg_rtpg",
    "sg_inq",
    "multipathd",
    "ss",
    "rdma",
    "iscsi-test-cu",
    "cryptsetup",
    "openssl",
];

/// Additional programs for scripts that use kernel TLS.
pub(crate) const FOR_TLS: &[&str] = &["tlshd", "keyctl"];

/// Additional programs for scripts that run the file-system study; this `ip` knows more than that
/// of busybox.
pub(crate) const FOR_STUDY: &[&str] = &["bonnie++", "ip", "tc"];

/// Modules of the guest; their dependencies are added.
const MODULES: &[&str] = &[
    "virtio_net",
    "virtio_blk",
    "configfs",
    "crc32_generic",
    "crc32c_generic",
    "crc32c_intel",
    "sd_mod",
    "ext4",
    "xfs",
    "iscsi_tcp",
    "iscsi_ibft",
    "iscsi_target_mod",
    "target_core_file",
    "nbd",
    "nvme_tcp",
    "nvmet_tcp",
    "tls",
    "gcm",
    "ghash_generic",
    "aoe",
    "ublk_drv",
    "tcp_diag",
    "veth",
    "sch_tbf",
    "sch_netem",
    "ib_iser",
    "ib_isert",
    "nvme_rdma",
    "nvmet_rdma",
    "ib_srp",
    "ib_srpt",
    "dm_multipath",
    "dm_round_robin",
    "dm_crypt",
    "xts",
    "aes_generic",
    "sha256_generic",
    "algif_skcipher",
    "scsi_dh_alua",
    "rdma_rxe",
    "rdma_ucm",
];

/// Modules that are parts of the kernel itself from Linux 6.16 on.
const PARTS_OF_NEWER_KERNELS: &[&str] =
    &["crc32_generic", "crc32c_generic", "crc32c_intel", "libcrc32c", "sha256_generic"];

/// Name of an image, around the number of the process that has made it.
const PREFIX: &str = "image-";
const SUFFIX: &str = ".cpio";

/// Files of this machine that programs read.
const FILES: &[&str] = &[
    "/etc/iscsi/iscsid.conf",
    "/etc/mke2fs.conf",
    "/etc/protocols",
    "/lib/multipath/libchecktur.so",
    "/lib/multipath/libprioalua.so",
    "/lib/multipath/libprioconst.so",
];

/// Writes an image with the scripts of `scripts`, our programs `ours`, and the module `siw` if
/// given. Its first process is the script `init`.
///
/// # Errors
/// If a program or a module is missing, or nothing can be written.
pub(crate) fn build(
    scripts: &Path,
    kernel: &Kernel,
    siw: Option<&Path>,
    ours: &[PathBuf],
    image: &Path,
) -> Result<()> {
    let directory = tempfile::tempdir_in(image.parent().context("the image's path has no directory")?)?;
    let root = directory.path();
    for empty in [
        "dev",
        "proc",
        "sys",
        "run/lock",
        "tmp",
        "mnt",
        "var/lib/iscsi",
        "etc",
        "usr/bin",
        "usr/lib",
        "lib64",
    ] {
        fs::create_dir_all(root.join(empty))?;
    }
    for (link, to) in [("bin", "usr/bin"), ("sbin", "usr/bin"), ("usr/sbin", "bin"), ("lib", "usr/lib")] {
        symlink(to, root.join(link))?;
    }
    symlink("dash", root.join("usr/bin/sh"))?;
    symlink("kmod", root.join("usr/bin/modprobe"))?;
    let optional = FOR_TLS.iter().chain(FOR_STUDY).chain(rxe::PROGRAMS);
    let optional = optional.filter(|program| find(program).is_some());
    let names: Vec<&str> = PROGRAMS.iter().chain(optional).copied().collect();
    let programs = names.iter().map(|program| find(program).with_context(|| format!("no {program}")));
    let programs = programs.collect::<Result<Vec<_>>>()?;
    for (name, program) in names.iter().zip(&programs) {
        fs::copy(program, root.join("usr/bin").join(name)).with_context(|| program.display().to_string())?;
    }
    for program in ours {
        let name = program.file_name().context("a program's path has no file name")?;
        // Debug information is most of a program's size.
        succeed(Command::new("strip").arg("-o").arg(root.join("usr/bin").join(name)).arg(program))?;
    }
    let for_siw: &[&str] = if siw.is_some() { siw::PROVIDER } else { &[] };
    let for_rxe = rxe::PROVIDER.iter().filter(|file| Path::new(file).exists());
    let files = FILES.iter().chain(for_siw).chain(for_rxe).map(Path::new);
    let linked: Vec<PathBuf> = programs.into_iter().chain(ours.iter().cloned()).collect();
    for file in libraries(&linked)?.iter().map(PathBuf::as_path).chain(files) {
        copy_to_the_same_place(file, root)?;
    }
    copy_modules(kernel, siw, root)?;
    for script in fs::read_dir(scripts)? {
        let script = script?.path();
        fs::copy(&script, root.join(script.file_name().context("the script's path has no file name")?))?;
    }
    pack(root, image)
}

/// The path of this process's image in `place`. Each process has its own, because what the guests
/// need depends on the scripts. Those of processes that have ended are removed.
///
/// # Errors
/// If `place` cannot be read, or an image cannot be removed.
pub(crate) fn of_this_process(place: &Path) -> Result<PathBuf> {
    for entry in fs::read_dir(place)? {
        let name = entry?.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX));
        if process.is_some_and(|process| !Path::new("/proc").join(process).exists()) {
            fs::remove_file(place.join(name))?;
        }
    }
    Ok(place.join(format!("{PREFIX}{}{SUFFIX}", std::process::id())))
}

fn copy_to_the_same_place(file: &Path, root: &Path) -> Result<()> {
    let path = file.strip_prefix("/").with_context(|| file.display().to_string())?;
    let to = root.join(path);
    fs::create_dir_all(to.parent().unwrap_or(root))?;
    fs::copy(file, to).with_context(|| file.display().to_string())?;
    Ok(())
}

/// The shared libraries of `programs`, each once.
fn libraries(programs: &[PathBuf]) -> Result<BTreeSet<PathBuf>> {
    let mut libraries = BTreeSet::new();
    for program in programs {
        // ldd fails for statically linked programs.
        let said = crate::process::output(Command::new("ldd").arg(program))?;
        libraries.extend(said.text.lines().filter_map(library));
    }
    Ok(libraries)
}

/// The path in a line of ldd, such as `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f...)`.
fn library(line: &str) -> Option<PathBuf> {
    let (before, _) = line.split_once(" (0x")?;
    let path = before.split_once("=> ").map_or(before, |(_, path)| path).trim();
    path.starts_with('/').then(|| path.into())
}

/// Copies modules uncompressed, because the emulated guest is slow.
fn copy_modules(kernel: &Kernel, siw: Option<&Path>, root: &Path) -> Result<()> {
    let modules = root.join("usr/lib/modules").join(&kernel.release);
    let needs = fs::read_to_string(kernel.modules.join("modules.dep"))?;
    let built_in = fs::read_to_string(kernel.modules.join("modules.builtin"))?;
    let names = [MODULES, siw::NEEDS].concat();
    for file in files_of(&names, &needs, &built_in)? {
        let to = modules.join(&file).with_extension("");
        fs::create_dir_all(to.parent().unwrap_or(&modules))?;
        let from = kernel.modules.join(&file);
        let status = Command::new("xz").arg("-dc").arg(&from).stdout(File::create(to)?).status()?;
        if !status.success() {
            bail!("cannot unpack {}", from.display());
        }
    }
    if let Some(siw) = siw {
        fs::copy(siw, modules.join("siw.ko")).with_context(|| siw.display().to_string())?;
    }
    for list in ["modules.builtin", "modules.builtin.modinfo", "modules.order"] {
        fs::copy(kernel.modules.join(list), modules.join(list)).context(list)?;
    }
    succeed(Command::new("depmod").arg("--basedir").arg(root).arg(&kernel.release))?;
    Ok(())
}

/// The files of modules and of their dependencies. `needs` is `modules.dep`: on each line a file
/// and all files that it depends on. `built_in` lists what is part of the kernel.
fn files_of(names: &[&str], needs: &str, built_in: &str) -> Result<BTreeSet<String>> {
    let lines = needs.lines().filter_map(|line| line.split_once(':'));
    let needs: BTreeMap<String, (&str, &str)> =
        lines.map(|(file, needs)| (module(file), (file, needs))).collect();
    let mut files = BTreeSet::new();
    for name in names {
        match needs.get(*name) {
            Some((file, needs)) => files.extend([*file].into_iter().chain(needs.split_whitespace())),
            None if built_in.lines().any(|file| module(file) == *name) => {}
            None if PARTS_OF_NEWER_KERNELS.contains(name) => {}
            None => bail!("the kernel has no module {name}"),
        }
    }
    Ok(files.into_iter().map(str::to_owned).collect())
}

/// A module's name from its file name.
fn module(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or_default();
    name.split('.').next().unwrap_or_default().replace('-', "_")
}

/// Writes the initramfs archive, uncompressed because the emulated guest is slow.
fn pack(root: &Path, image: &Path) -> Result<()> {
    let mut find =
        Command::new("busybox").args(["find", "."]).current_dir(root).stdout(Stdio::piped()).spawn()?;
    let names = find.stdout.take().context("the output of `find` is a pipe")?;
    let mut cpio = Command::new("busybox");
    cpio.args(["cpio", "-o", "-H", "newc", "-R", "0:0"]).current_dir(root);
    let status = cpio.stdin(names).stdout(File::create(image)?).stderr(Stdio::null()).status()?;
    if !find.wait()?.success() || !status.success() {
        bail!("busybox cannot pack {}", image.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_of_ended_processes_are_removed_and_those_of_others_stay() {
        let place = tempfile::tempdir().unwrap();
        let mut ended = Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        // Process 1 always runs.
        let [gone, other, log] = [&format!("image-{}.cpio", ended.id()), "image-1.cpio", "iscsi.log"]
            .map(|name| place.path().join(name));
        for file in [&gone, &other, &log] {
            fs::write(file, "").unwrap();
        }
        let own = of_this_process(place.path()).unwrap();
        assert!(own != other && own.parent() == Some(place.path()));
        assert_eq!([gone, other, log].map(|file| file.exists()), [false, true, true]);
    }

    #[test]
    fn lines_of_ldd_have_libraries_or_none() {
        for (line, path) in [
            (
                "\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f0)",
                Some("/lib/x86_64-linux-gnu/libc.so.6"),
            ),
            ("\t/lib64/ld-linux-x86-64.so.2 (0x00007f0)", Some("/lib64/ld-linux-x86-64.so.2")),
            ("\tlinux-vdso.so.1 (0x00007f0)", None),
            ("\tnot a dynamic executable", None),
        ] {
            assert_eq!(library(line), path.map(PathBuf::from), "{line}");
        }
    }

    #[test]
    fn modules_are_copied_with_their_dependencies_but_not_if_built_in() {
        let needs =
            "kernel/fs/xfs/xfs.ko.xz: kernel/lib/libcrc32c.ko.xz\nkernel/a/tcp-a.ko.xz:\nkernel/b.ko.xz:\n";
        let files = files_of(&["xfs", "tcp_a", "virtio"], needs, "kernel/virtio.ko\n").unwrap();
        let expected = ["kernel/a/tcp-a.ko.xz", "kernel/fs/xfs/xfs.ko.xz", "kernel/lib/libcrc32c.ko.xz"];
        assert_eq!(files, expected.map(str::to_owned).into());
        let error = files_of(&["zfs"], needs, "").unwrap_err();
        assert_eq!(error.to_string(), "the kernel has no module zfs");
    }
}
