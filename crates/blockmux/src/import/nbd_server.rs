//! The config of nbd-server: exports in sections.

use super::access::begins;
use super::listeners::network;
use super::members::switch;
use super::model::{Imported, ImportedVolume};
use super::notes::Notes;
use super::source::SourceText;
use super::specs::{self, StorageOptions};
use super::tree::{Statement, SyntaxError, sections};
use crate::failure::Failure;
use std::path::{Path, PathBuf};
use toml::Value;

/// Whether the statement is one of this format, which begins with its own section.
pub(super) fn is_own(statement: &Statement) -> bool {
    statement.is_block && statement.keyword() == "generic"
}

/// Reads a file and those of its `includedir`.
///
/// # Errors
/// If a file does not follow the syntax.
pub(super) fn read(source: &SourceText) -> Result<Imported, Failure> {
    let mut imported = Imported::default();
    let mut generic = Generic { port: 10_809, ..Generic::default() };
    let statements = parse(source)?;
    for section in &statements {
        match section.keyword() {
            "generic" if section.is_block => generic.read(section, &mut imported.notes),
            name if section.is_block => export(name, section, source.path(), &mut imported),
            key => imported.notes.setting(key, &section.value()),
        }
    }
    for file in generic.included(source.path(), &mut imported.notes) {
        let included = SourceText::of_file(&file)?;
        for section in parse(&included)?.iter().filter(|section| section.is_block) {
            export(section.keyword(), section, included.path(), &mut imported);
        }
    }
    generic.apply(&mut imported);
    Ok(imported)
}

fn parse(source: &SourceText) -> Result<Vec<Statement>, Failure> {
    sections(source.text()).map_err(|SyntaxError { line, what }| source.wrong(line, &what))
}

/// What `[generic]` says.
#[derive(Default)]
struct Generic {
    addresses: Vec<String>,
    port: u16,
    socket: Option<String>,
    include: Option<String>,
    certificate: Option<String>,
    authority: Option<String>,
    demands_tls: bool,
}

impl Generic {
    fn read(&mut self, section: &Statement, notes: &mut Notes) {
        for own in &section.below {
            let (key, value) = (own.keyword(), own.value());
            match key {
                "listenaddr" => self.addresses.extend(value.split([' ', ',']).map(str::to_owned)),
                "port" if value.parse::<u16>().is_ok() => self.port = value.parse().unwrap_or(self.port),
                "unixsock" => self.socket = Some(value),
                "includedir" => self.include = Some(value),
                "certfile" => self.certificate = Some(value),
                // Without it, TLS clients would need no certificate.
                _ if begins(key, &["cacertfile"]) => self.authority = Some(value),
                "keyfile" => {}
                key if begins(key, &["force_tls"]) => self.demands_tls |= switch(&value) != Some(false),
                // Exports are listed to clients that ask, as by nbd-server with this option.
                "allowlist" if switch(&value) == Some(true) => {}
                "oldstyle" if switch(&value) == Some(false) => {}
                _ => notes.setting(key, &value),
            }
        }
        self.addresses.retain(|address| !address.is_empty());
    }

    /// The files of `includedir` whose names end in `.conf`, in the order of their names.
    fn included(&self, config: &Path, notes: &mut Notes) -> Vec<PathBuf> {
        let Some(directory) = &self.include else { return Vec::new() };
        let directory = config.parent().unwrap_or(Path::new("")).join(directory);
        let Ok(entries) = std::fs::read_dir(&directory) else {
            notes.remark(format!("includedir {}: there is no such directory here", directory.display()));
            return Vec::new();
        };
        let paths = entries.flatten().map(|entry| entry.path());
        let mut files: Vec<_> = paths
            .filter(|path| path.extension().is_some_and(|end| end == "conf") && path.is_file())
            .collect();
        files.sort();
        files.truncate(MAX_FILES);
        files
    }

    fn apply(mut self, imported: &mut Imported) {
        if self.addresses.is_empty() {
            self.addresses.push("::".to_owned());
        }
        for address in &self.addresses {
            if imported.listeners.add("nbd", address, self.port, false).is_none() {
                imported.notes.setting("listenaddr", address);
            }
        }
        if let Some(socket) = &self.socket {
            imported.listeners.add_unix("nbd", socket);
        }
        if self.certificate.is_none() && !self.demands_tls {
            return;
        }
        let certificate = self.certificate.unwrap_or_default();
        imported.notes.remark(format!(
            "TLS: copy certfile ({certificate}) to {TLS}/server-cert.pem, keyfile to {TLS}/server-key.pem (chmod 600) and \
             cacertfile to {TLS}/ca-cert.pem"
        ));
        imported.keys.push(("nbd_tls", if self.demands_tls { "require" } else { "on" }.into()));
        imported.keys.push(("nbd_tls_certificates", Value::from(vec![TLS])));
        if self.authority.is_none() {
            imported.keys.push(("nbd_tls_verify_peer", false.into()));
        }
    }
}

fn export(name: &str, section: &Statement, file: &Path, imported: &mut Imported) {
    let mut notes = Notes::default();
    let mut options = StorageOptions::default();
    let (mut path, mut allow, mut description) = (None, None, String::new());
    let (mut read_only, mut lost) = (false, None);
    for own in &section.below {
        let (key, value) = (own.keyword(), own.value());
        match key {
            "exportname" => path = Some(value),
            // Clients may not write where they perhaps could not before.
            _ if begins(key, &["readonly"]) => read_only |= switch(&value) != Some(false),
            "filesize" => match specs::size(&value) {
                Some(size) => options.size = Some(size),
                None => notes.setting(key, &value),
            },
            "authfile" => allow = Some(networks(&value, file, &mut notes)),
            _ if begins(key, &["authfile"]) => {
                notes.setting(key, &value);
                allow = Some(Vec::new());
            }
            "comment" => description = value,
            // Writes would change the file, which nbd-server did not.
            _ if begins(key, &["copyonwrite", "temporary", "multifile"]) => {
                if switch(&value) != Some(false) {
                    lost = Some(format!("export {name} is left out, because of its {key}"));
                }
            }
            "flush" | "fua" | "trim" | "rotational" | "splice" | "sparse_conf" => {}
            _ => notes.setting(key, &value),
        }
    }
    let lost =
        lost.or_else(|| path.is_none().then(|| format!("export {name} is left out: it has no exportname")));
    let (Some(path), None) = (path, &lost) else {
        return lost.into_iter().for_each(|lost| imported.notes.lost(lost));
    };
    let spec = specs::of_path(&path, options, &mut notes);
    let mut volume = ImportedVolume::new(imported.free_name(name), spec);
    if volume.name != name {
        notes.lost(format!("export name {name}: clients need the name {}", volume.name));
    }
    if let Some(other) = imported.volumes.iter().find(|other| other.spec == volume.spec) {
        notes.remark(format!("the same file as volume {}: their locks and limits are separate", other.name));
    }
    volume.read_only = read_only;
    volume.allow = allow;
    volume.description = description;
    volume.is_nbd = true;
    volume.notes = notes;
    imported.volumes.push(volume);
}

/// The networks of an `authfile`. What cannot be read must not let everybody in.
fn networks(authfile: &str, config: &Path, notes: &mut Notes) -> Vec<String> {
    let path = config.parent().unwrap_or(Path::new("")).join(authfile);
    let Ok(source) = SourceText::of_file(&path) else {
        notes.lost(format!("authfile {authfile} is not here: add its networks to `allow`"));
        return Vec::new();
    };
    let mut networks = Vec::new();
    for line in source.text().lines() {
        let line = line.split('#').next().unwrap_or_default().trim();
        match network(line) {
            _ if line.is_empty() => {}
            Some(network) => networks.push(network),
            None => notes.lost(format!("authfile: {line}")),
        }
    }
    networks
}

/// Directory of certificates, beside the written config.
const TLS: &str = "tls";
/// Maximum number of included files.
const MAX_FILES: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_networks_of_an_authfile_are_those_of_the_volume() {
        let directory = tempfile::tempdir().unwrap();
        let there = |name: &str| directory.path().join(name);
        fs::create_dir(there("conf.d")).unwrap();
        fs::write(there("allow"), "# hosts\n192.0.2.1\n10.0.0.0/8 # all\n\nhost.example.com\n").unwrap();
        fs::write(there("conf.d/b.conf"), "[b]\nexportname = /srv/b\nauthfile = missing\n").unwrap();
        fs::write(there("conf.d/c"), "[").unwrap();
        let config = "[generic]\nincludedir = conf.d\n[a]\nexportname = /srv/a\nauthfile = allow\n";
        fs::write(there("config"), config).unwrap();
        let imported = read(&SourceText::read(&there("config")).unwrap()).ok().unwrap();
        let allowed: Vec<_> = imported.volumes.iter().map(|volume| volume.allow.clone().unwrap()).collect();
        assert_eq!(allowed, [vec!["192.0.2.1".to_owned(), "10.0.0.0/8".to_owned()], Vec::new()]);
        assert_eq!(
            imported.volumes[0].notes.lines().collect::<Vec<_>>(),
            ["# no counterpart: authfile: host.example.com"]
        );
    }
}
