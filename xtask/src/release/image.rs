//! The container image: an OCI image layout in one file, of the static programs. No daemon and no
//! base image is needed, since such a program needs nothing else.

use super::Release;
use crate::process::succeed;
use anyhow::{Context, Result};
use serde_json::{Value as Json, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Writes `blockmux-VERSION.oci.tar`, with an image for each architecture and its program.
///
/// # Errors
/// If a file cannot be written, or a tool fails.
pub(super) fn write(release: &Release<'_>, programs: &[(&str, PathBuf)]) -> Result<()> {
    let layout = Layout { folder: &release.scratch("oci")?, release };
    fs::create_dir_all(layout.folder.join(BLOBS)).context(BLOBS)?;
    let created = succeed(Command::new("date").args([
        "--utc",
        "--date",
        &format!("@{}", release.seconds),
        "+%Y-%m-%dT%H:%M:%SZ",
    ]))?;
    let mut manifests = Vec::new();
    for (architecture, program) in programs {
        let (layer, diff_id) = layout.layer(program)?;
        let config = config(architecture, created.trim(), &diff_id);
        let config = layout.blob(CONFIG, &config)?;
        let manifest =
            json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer]});
        let mut manifest = layout.blob(MANIFEST, &manifest)?;
        manifest["platform"] = json!({"architecture": architecture, "os": "linux"});
        manifests.push(manifest);
    }
    let images = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests});
    let mut images = layout.blob(INDEX, &images)?;
    images["annotations"] = json!({"org.opencontainers.image.ref.name": env!("CARGO_PKG_VERSION")});
    let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [images]});
    layout.file("index.json", &index)?;
    layout.file("oci-layout", &json!({"imageLayoutVersion": "1.0.0"}))?;
    let archive = release.out.join(concat!("blockmux-", env!("CARGO_PKG_VERSION"), ".oci.tar"));
    let parts = ["oci-layout", "index.json", "blobs"];
    succeed(release.tar(&archive).arg("-c").arg("-C").arg(layout.folder).args(parts))?;
    Ok(())
}

/// The folder that becomes the file.
struct Layout<'a> {
    folder: &'a Path,
    release: &'a Release<'a>,
}

impl Layout<'_> {
    /// Adds the only layer of a program's image; returns its descriptor, and the digest of what it
    /// is when it is not compressed.
    fn layer(&self, program: &Path) -> Result<(Json, String)> {
        let root = self.release.scratch("image")?;
        for folder in ["usr/bin", "etc/blockmux", "var/lib/blockmux", "run/blockmux", "tmp"] {
            fs::create_dir_all(root.join(folder)).context(folder)?;
        }
        fs::copy(program, root.join("usr/bin/blockmux")).with_context(|| program.display().to_string())?;
        fs::write(root.join("etc/passwd"), PASSWD).context("passwd")?;
        fs::write(root.join("etc/group"), GROUP).context("group")?;
        let tar = self.folder.with_file_name("layer.tar");
        let system = ["etc", "usr"];
        succeed(self.release.tar(&tar).args(["--mode=u=rwX,go=rX", "-c", "-C"]).arg(&root).args(system))?;
        let own = ["--owner=999", "--group=999", "--mode=700", "-r", "-C"];
        let folders = ["var/lib/blockmux", "run/blockmux"];
        succeed(self.release.tar(&tar).args(own).arg(&root).args(folders))?;
        succeed(self.release.tar(&tar).args(["--mode=1777", "-r", "-C"]).arg(&root).arg("tmp"))?;
        let diff_id = digest(&tar)?;
        succeed(Command::new("gzip").args(["-n", "-9", "-f"]).arg(&tar))?;
        Ok((self.add(&tar.with_extension("tar.gz"), LAYER)?, diff_id))
    }

    /// Adds a JSON document; returns its descriptor.
    fn blob(&self, media_type: &str, json: &Json) -> Result<Json> {
        let path = self.folder.with_file_name("blob.json");
        fs::write(&path, json.to_string()).with_context(|| path.display().to_string())?;
        self.add(&path, media_type)
    }

    /// Moves a file to where its digest says; returns its descriptor.
    fn add(&self, path: &Path, media_type: &str) -> Result<Json> {
        let digest = digest(path)?;
        let size = fs::metadata(path).with_context(|| path.display().to_string())?.len();
        let name = digest.trim_start_matches("sha256:");
        fs::rename(path, self.folder.join(BLOBS).join(name)).with_context(|| path.display().to_string())?;
        Ok(json!({"mediaType": media_type, "digest": digest, "size": size}))
    }

    fn file(&self, name: &str, json: &Json) -> Result<()> {
        fs::write(self.folder.join(name), json.to_string()).with_context(|| name.to_owned())
    }
}

/// What runs in a container, as `contrib/Containerfile` has it.
fn config(architecture: &str, created: &str, diff_id: &str) -> Json {
    json!({
        "created": created,
        "architecture": architecture,
        "os": "linux",
        "config": {
            "User": "999:999",
            "ExposedPorts": {"10809/tcp": {}, "3260/tcp": {}, "4420/tcp": {}},
            "Volumes": {"/var/lib/blockmux": {}},
            "StopSignal": "SIGTERM",
            "Env": ["PATH=/usr/bin"],
            "Entrypoint": ["/usr/bin/blockmux"],
            "Cmd": ["serve", "mem:1g", "--nbd", "0.0.0.0"],
            "Labels": {
                "org.opencontainers.image.title": "blockmux",
                "org.opencontainers.image.version": env!("CARGO_PKG_VERSION"),
                "org.opencontainers.image.licenses": "MIT OR Apache-2.0",
            },
        },
        "rootfs": {"type": "layers", "diff_ids": [diff_id]},
        "history": [{"created": created, "created_by": "cargo xtask release"}],
    })
}

/// The digest of a file, with its algorithm.
fn digest(path: &Path) -> Result<String> {
    let said = succeed(Command::new("sha256sum").arg(path))?;
    let sum = said.split_whitespace().next().context("sha256sum says nothing")?;
    // A backslash marks a path with special characters.
    Ok(format!("sha256:{}", sum.trim_start_matches('\\')))
}

const BLOBS: &str = "blobs/sha256";
const PASSWD: &str = "root:x:0:0:root:/:/usr/sbin/nologin\n\
                      blockmux:x:999:999::/var/lib/blockmux:/usr/sbin/nologin\n";
const GROUP: &str = "root:x:0:\nblockmux:x:999:\n";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::find;
    use crate::repository;
    use std::os::unix::fs::PermissionsExt;

    /// A layout of two programs that are scripts.
    fn made() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("out");
        fs::create_dir(&out).unwrap();
        let program = directory.path().join("program");
        fs::write(&program, "#!/bin/sh\n").unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o775)).unwrap();
        let release = Release { root: repository(), out: &out, seconds: "1700000000" };
        write(&release, &[("amd64", program.clone()), ("arm64", program)]).unwrap();
        directory
    }

    fn archive(directory: &tempfile::TempDir) -> PathBuf {
        directory.path().join("out").join(concat!("blockmux-", env!("CARGO_PKG_VERSION"), ".oci.tar"))
    }

    fn unpacked(directory: &tempfile::TempDir) -> PathBuf {
        let folder = directory.path().join("unpacked");
        fs::create_dir(&folder).unwrap();
        succeed(Command::new("tar").arg("-xf").arg(archive(directory)).arg("-C").arg(&folder)).unwrap();
        folder
    }

    /// The path of the blob that a descriptor names, after a look at its length and digest.
    fn blob(folder: &Path, descriptor: &Json) -> PathBuf {
        let sum = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
        let path = folder.join(BLOBS).join(sum);
        assert_eq!(fs::metadata(&path).unwrap().len(), descriptor["size"].as_u64().unwrap());
        assert_eq!(digest(&path).unwrap(), descriptor["digest"].as_str().unwrap());
        path
    }

    fn json(path: &Path) -> Json {
        serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
    }

    #[test]
    fn the_image_has_a_program_for_each_architecture_that_its_own_user_runs() {
        let directory = made();
        let folder = unpacked(&directory);
        let index = json(&folder.join("index.json"));
        let images = json(&blob(&folder, &index["manifests"][0]));
        assert_eq!(images["manifests"][1]["platform"]["architecture"], "arm64");
        let manifest = json(&blob(&folder, &images["manifests"][0]));
        let config = json(&blob(&folder, &manifest["config"]));
        assert_eq!(config["created"], "2023-11-14T22:13:20Z");
        assert_eq!(config["config"]["User"], "999:999");
        let layer = blob(&folder, &manifest["layers"][0]);
        let listed = succeed(Command::new("tar").args(["--numeric-owner", "-tvzf"]).arg(layer)).unwrap();
        let of = |name: &str| listed.lines().find(|line| line.ends_with(&format!(" {name}"))).unwrap();
        assert!(of("usr/bin/blockmux").starts_with("-rwxr-xr-x 0/0 "), "{listed}");
        assert!(of("var/lib/blockmux/").starts_with("drwx------ 999/999 "), "{listed}");
        assert!(of("run/blockmux/").starts_with("drwx------ 999/999 "), "{listed}");
        assert!(of("tmp/").starts_with("drwxrwxrwt 0/0 "), "{listed}");
    }

    #[test]
    fn the_same_programs_make_the_same_file() {
        let [one, other] = [made(), made()].map(|directory| fs::read(archive(&directory)).unwrap());
        assert!(one == other);
    }

    #[test]
    fn skopeo_reads_the_image() {
        let Some(skopeo) = find("skopeo") else {
            println!("skipped: skopeo reads the container image (no skopeo)");
            return;
        };
        let directory = made();
        for architecture in ["amd64", "arm64"] {
            let to = directory.path().join(architecture);
            let mut copy = Command::new(&skopeo);
            copy.args(["--insecure-policy", "--override-arch", architecture, "copy"]);
            copy.arg(format!("oci-archive:{}", archive(&directory).display()));
            succeed(copy.arg(format!("dir:{}", to.display()))).unwrap();
            assert!(to.join("manifest.json").exists());
        }
    }
}
