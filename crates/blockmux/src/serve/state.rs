//! Where reservations are kept that outlive a restart, and for which volume.

use crate::failure::Failure;
use blockmux_engine::state::StateFile;
use blockmux_proto::served::{Served, VolumeIdentity};
use blockmux_volume::Volume;
use blockmux_volume::spec::{MemSpec, Spec};
use rustix::process::geteuid;
use std::env;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf, absolute};
use std::sync::Arc;
use tracing::{info, warn};

/// Where the state of programs is, by the XDG Base Directory Specification; `None` for a user
/// without a home. A user who runs with the home of another, as by `sudo -u` or `setpriv`, has a
/// private directory in its place.
pub(super) fn default_directory() -> Option<PathBuf> {
    let directory = home_directory()?;
    let user = geteuid();
    if user.is_root() || env::var_os("XDG_STATE_HOME").is_some_and(|path| Path::new(&path).is_absolute()) {
        return Some(directory);
    }
    let home = PathBuf::from(env::var_os("HOME")?);
    let is_own = home.metadata().is_ok_and(|found| found.uid() == user.as_raw());
    if is_own {
        return Some(directory);
    }
    let private = Path::new(PRIVATE).join(format!("blockmux-{}", user.as_raw()));
    warn!(
        "{} is not the home of this user: reservations are kept in {}; choose another place with --state",
        home.display(),
        private.display()
    );
    Some(private)
}

fn home_directory() -> Option<PathBuf> {
    // The specification has relative paths ignored.
    let directory = |variable| env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let state =
        directory("XDG_STATE_HOME").or_else(|| directory("HOME").map(|home| home.join(".local/state")));
    state.map(|state| state.join("blockmux"))
}

/// A volume as it is served, with the reservations that were kept of the data with its UUID. One
/// whose reservations cannot be read is not served: whoever was kept out would get in. Of data that
/// go with the process none are kept.
pub(super) fn served(
    directory: Option<&Path>,
    (name, spec): (&str, &Spec),
    volume: Arc<dyn Volume>,
    identity: VolumeIdentity,
    is_lasting: bool,
) -> Result<Arc<Served>, Failure> {
    let wrong = |what: String| Failure::request(format!("reservations of `{name}`: {what}"));
    let former = former_identity(spec, name);
    let Some(directory) = directory.filter(|_| is_lasting) else {
        if let Some(file) = directory.and_then(|directory| StateFile::former(directory, &former)) {
            let file = file.display();
            warn!(
                "`{name}`: its data went with an earlier process; {file} has reservations of them: remove it"
            );
        }
        return Served::identified(volume, identity, None).map_err(|error| wrong(error.to_string()));
    };
    let opened = StateFile::open(directory, &identity.uuid.to_string(), &former);
    let (file, image) = opened.map_err(|error| wrong(error.to_string()))?;
    if !image.is_empty() {
        info!("`{name}`: reservations from {}", file.path().display());
    }
    let path = file.path().display().to_string();
    Served::identified(volume, identity, Some((file, &image))).map_err(|error| {
        wrong(format!("{path} {error}; move it away to serve the volume without reservations"))
    })
}

/// What Blockmux 0.1 named the volume by where it kept reservations, before volumes had UUIDs.
fn former_identity(spec: &Spec, name: &str) -> String {
    match spec {
        Spec::Mem(mem) => format!("{} {name}", Spec::Mem(MemSpec::new(mem.size))),
        Spec::Null(_) => format!("{spec} {name}"),
        Spec::File(file) => {
            let path = file.path.canonicalize().or_else(|_| absolute(&file.path));
            format!("file:{}", path.as_deref().unwrap_or(&file.path).display())
        }
        // What a link below /dev/disk leads to has another name after a restart, and the link the same.
        Spec::Block(block) => {
            format!("block:{}", absolute(&block.path).as_deref().unwrap_or(&block.path).display())
        }
        Spec::Stripe { chunk, members } => {
            let members: Vec<String> = members.iter().map(|member| former_identity(member, name)).collect();
            format!("stripe:{chunk}:[{}]", members.join("],["))
        }
        Spec::Delay(_, inner) | Spec::Fault(_, inner) | Spec::Rate(_, inner) | Spec::Log(_, inner) => {
            former_identity(inner, name)
        }
        Spec::Url(url) => url.to_string(),
    }
}

/// Everybody may make directories there, and they outlive a restart.
const PRIVATE: &str = "/var/tmp";

#[cfg(test)]
mod tests {
    use super::*;

    fn named(spec: &str) -> String {
        former_identity(&spec.parse().unwrap(), "disk0")
    }

    #[test]
    fn the_former_identity_is_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().canonicalize().unwrap().join("a.img");
        std::fs::write(&path, [0; 512]).unwrap();
        let link = path.with_file_name("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let expected = format!("file:{}", path.display());
        assert_eq!(named(&format!("file:{}", link.display())), expected);
        assert_eq!(named(&format!("delay:1ms:log:-:file:{}?direct=off&size=1m", path.display())), expected);
        assert_eq!(named("block:/dev/disk/by-id/a?readonly=on"), "block:/dev/disk/by-id/a");
        assert_eq!(named("mem:1g"), "mem:1g disk0");
        assert_eq!(
            named("stripe:64k:block:/dev/a,block:/dev/b"),
            "stripe:65536:[block:/dev/a],[block:/dev/b]"
        );
        assert_eq!(named("nbd://host/a"), "nbd://host/a");
    }
}
