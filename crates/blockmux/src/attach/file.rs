//! Where the files of volumes are that are attached as files.

use super::AttachArgs;
use crate::failure::Failure;
use blockmux_engine::attach::DiskOptions;
use blockmux_engine::attach::fuse::FuseOptions;
use blockmux_engine::attach::own_io::OwnIo;
use blockmux_volume::Spec;
use blockmux_volume::spec::{BlockSpec, FileSpec, VhostUserSpec};
use rustix::process::geteuid;
use std::path::{Path, PathBuf};

/// The options of the files of all volumes.
pub(super) fn options(args: &AttachArgs, io: OwnIo) -> Result<FuseOptions, Failure> {
    let files = match &args.name {
        Some(name) => vec![name.as_str().to_owned()],
        None => names_of(&args.volumes)?,
    };
    let mount_point = match (&args.directory, &files[..]) {
        (Some(directory), _) => directory.clone(),
        (None, [file]) => default_directory()?.join(file),
        (None, _) => {
            return Err(Failure::request("several volumes need a directory; name one with --directory"));
        }
    };
    let (allow_other, read_only) = (args.allow_other, args.read_only);
    Ok(FuseOptions { mount_point, files, allow_other, read_only, depth: args.iodepth, io })
}

/// The options of the file of a disk without a spec, which is named after its volume if it has no
/// name. `None` if there is no directory for it.
pub(super) fn plain_options(disk: &DiskOptions, volume: &str) -> Option<FuseOptions> {
    let file = disk.name.as_ref().map_or_else(|| of_text(volume), |name| name.as_str().to_owned());
    let mount_point = default_directory().ok()?.join(&file);
    let (read_only, io) = (disk.read_only, disk.io.clone());
    Some(FuseOptions { mount_point, files: vec![file], allow_other: false, read_only, depth: disk.depth, io })
}

/// The directory of all directories that no option names.
fn default_directory() -> Result<PathBuf, Failure> {
    let name = "blockmux-files";
    if geteuid().is_root() {
        return Ok(Path::new("/run").join(name));
    }
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|runtime| !runtime.is_empty());
    let none = || Failure::request("XDG_RUNTIME_DIR is not set; name a directory with --directory");
    Ok(PathBuf::from(runtime.ok_or_else(none)?).join(name))
}

/// A name for the file of each volume.
fn names_of(volumes: &[Spec]) -> Result<Vec<String>, Failure> {
    let mut names: Vec<String> = Vec::with_capacity(volumes.len());
    for spec in volumes {
        let name = name_of(spec);
        if names.contains(&name) {
            return Err(Failure::request(format!(
                "{spec}: another volume has the name of its file, {name}; attach one of them in another directory"
            )));
        }
        names.push(name);
    }
    Ok(names)
}

/// A name for the volume's file: that of its own file or device, or the path in its URL.
fn name_of(spec: &Spec) -> String {
    match spec {
        Spec::Mem(_) => "mem".to_owned(),
        Spec::Null(_) => "null".to_owned(),
        Spec::File(FileSpec { path, .. })
        | Spec::Block(BlockSpec { path, .. })
        | Spec::VhostUser(VhostUserSpec { path, .. }) => {
            of_text(path.to_string_lossy().rsplit('/').next().unwrap_or_default())
        }
        Spec::Rbd(image) => of_text(&image.image),
        Spec::Slice(_, inner) | Spec::Decorated(_, inner) => name_of(inner),
        Spec::Stripe { .. } => "stripe".to_owned(),
        Spec::Url(url) => {
            let text = url.to_string();
            let without_scheme = text.split_once("://").map_or(text.as_str(), |(_, rest)| rest);
            let before_query = without_scheme.split(['?', '#']).next().unwrap_or_default();
            of_text(before_query.split_once('/').map_or("", |(_, path)| path))
        }
    }
}

fn of_text(text: &str) -> String {
    let name: String =
        text.trim_matches('/').chars().map(|c| if c == '/' || c.is_control() { '-' } else { c }).collect();
    match name.as_str() {
        "" | "." | ".." => "volume".to_owned(),
        _ if name.len() > MAX_LEN => "volume".to_owned(),
        _ => name,
    }
}

/// Length of the longest name in bytes.
const MAX_LEN: usize = 255;

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroU64;

    #[test]
    fn the_file_of_a_daemons_disk_has_the_name_of_the_disk_or_the_volume() {
        let file_of = |name: Option<&str>| {
            let name = name.map(|name| name.parse().unwrap());
            let (data, io, may_be_unprivileged) = (NonZeroU64::new(7), OwnIo::default(), false);
            let disk =
                DiskOptions { queues: 1, depth: 1, data, read_only: false, name, io, may_be_unprivileged };
            let options = plain_options(&disk, "more");
            options.map(|own| (own.mount_point.file_name().map(ToOwned::to_owned), own.files))
        };
        for (name, file) in [(None, "more"), (Some("own"), "own")] {
            // Without a directory for it, there is no file.
            assert!(file_of(name).is_none_or(|found| found == (Some(file.into()), vec![file.to_owned()])));
        }
    }

    #[test]
    fn a_file_is_named_after_its_volume() {
        let long = format!("nbd://host/{}", "x".repeat(300));
        for (spec, name) in [
            ("mem:1g", "mem"),
            ("file:/srv/disk.img?size=1m", "disk.img"),
            ("block:/dev/sda", "sda"),
            ("log:-:file:disk.img", "disk.img"),
            ("nbd://192.0.2.7:10809/backup?reconnect=5s", "backup"),
            ("nbd://192.0.2.7", "volume"),
            ("iscsi://192.0.2.7/iqn.2026-11.example:disk/0", "iqn.2026-11.example:disk-0"),
            (&long, "volume"),
        ] {
            assert_eq!(name_of(&spec.parse().unwrap()), name, "{spec}");
        }
    }

    #[test]
    fn two_files_of_a_directory_have_different_names() {
        let names = |specs: &[&str]| {
            let specs: Vec<Spec> = specs.iter().map(|spec| spec.parse().unwrap()).collect();
            names_of(&specs).map_err(|failure| failure.to_string())
        };
        assert_eq!(names(&["nbd://a/x", "file:/srv/y.img"]), Ok(vec!["x".to_owned(), "y.img".to_owned()]));
        let refused = names(&["nbd://a/x", "nbd://b/x"]).unwrap_err();
        assert!(refused.starts_with("nbd://b/x: another volume has the name of its file, x;"), "{refused}");
    }
}
