//! `targets.conf` of tgt, and the output of `tgt-admin --dump`, which has the same syntax.

use super::access::{AccessRules, begins, unknown_discovery_user};
use super::model::{
    ChapUser, Imported, ImportedChap, ImportedPortal, ImportedSecret, ImportedTarget, ImportedVolume,
};
use super::notes::Notes;
use super::parameters;
use super::source::SourceText;
use super::specs::{self, StorageOptions};
use super::tree::{Statement, SyntaxError, tags};
use super::unit_identity::{ScsiIdentity, tgt_naa};
use crate::failure::Failure;
use std::path::{Path, PathBuf};

/// Whether the statement is one of this format.
pub(super) fn is_own(statement: &Statement) -> bool {
    match statement.keyword() {
        "target" => statement.is_block,
        "default-driver" | "ignore-errors" => !statement.is_block,
        "include" => statement.argument(0).is_some_and(|path| path.starts_with('/')),
        _ => false,
    }
}

/// Reads a file and those that it includes.
///
/// # Errors
/// If a file does not follow the syntax.
pub(super) fn read(source: &SourceText) -> Result<Imported, Failure> {
    let mut imported = Imported::default();
    read_file(source, &mut imported, &mut Inclusion::default())?;
    let has_iser = imported.targets.iter_mut().any(|target| {
        // The driver's mark, which is not written.
        std::mem::take(&mut target.portals).iter().any(|portal| portal.address == ISER)
    });
    imported.listeners.add("iscsi", "0.0.0.0", 3260, has_iser);
    imported
        .notes
        .remark("tgtd's own options decide where it listens (--iscsi portal=); this is its default");
    Ok(imported)
}

/// The files that were included.
#[derive(Default)]
struct Inclusion {
    files: usize,
    /// Files that include the one that is read.
    depth: usize,
}

fn read_file(source: &SourceText, imported: &mut Imported, inclusion: &mut Inclusion) -> Result<(), Failure> {
    let statements = tags(source.text()).map_err(|SyntaxError { line, what }| source.wrong(line, &what))?;
    for statement in &statements {
        match statement.keyword() {
            "target" if statement.is_block => target(statement, imported),
            "include" => include(source, statement, imported, inclusion)?,
            keyword if begins(keyword, &["incomingdiscoveryuser"]) => {
                let user = user(statement).filter(|_| keyword == "incomingdiscoveryuser");
                let user = user.unwrap_or_else(|| unknown_discovery_user(keyword, &mut imported.notes));
                imported.discovery = Some(ImportedChap { user, target: None });
            }
            "outgoingdiscoveryuser" if imported.discovery.is_some() => {
                let own = user(statement);
                imported.discovery.iter_mut().for_each(|chap| chap.target.clone_from(&own));
            }
            "default-driver" if statement.argument(0) == Some("iscsi") => {}
            "ignore-errors" => {}
            keyword => imported.notes.setting(keyword, &statement.value()),
        }
    }
    Ok(())
}

fn include(
    source: &SourceText,
    statement: &Statement,
    imported: &mut Imported,
    inclusion: &mut Inclusion,
) -> Result<(), Failure> {
    let Some(pattern) = statement.argument(0) else { return Ok(()) };
    let directory = source.path().parent().unwrap_or(Path::new(""));
    let files = matching(&directory.join(pattern));
    if files.is_empty() {
        imported.notes.remark(format!("include {pattern}: there is no such file here"));
    }
    for file in files {
        if inclusion.files == MAX_FILES || inclusion.depth == MAX_DEPTH {
            return Err(
                source.wrong(statement.line, "there are too many included files, or they form a circle")
            );
        }
        inclusion.files += 1;
        inclusion.depth += 1;
        read_file(&SourceText::of_file(&file)?, imported, inclusion)?;
        inclusion.depth -= 1;
    }
    Ok(())
}

/// The files of a path whose last part may contain `*`, in the order of their names.
fn matching(pattern: &Path) -> Vec<PathBuf> {
    let name = pattern.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let Some((begin, end)) = name.split_once('*') else {
        return if pattern.is_file() { vec![pattern.to_owned()] } else { Vec::new() };
    };
    let entries = pattern.parent().and_then(|parent| std::fs::read_dir(parent).ok());
    let fits = |path: &PathBuf| {
        let own = path.file_name().unwrap_or_default().to_string_lossy();
        let is_long = own.len() >= begin.len() + end.len() && !own.starts_with('.');
        is_long && own.starts_with(begin) && own.ends_with(end) && path.is_file()
    };
    let mut files: Vec<_> =
        entries.into_iter().flatten().flatten().map(|entry| entry.path()).filter(fits).collect();
    files.sort();
    files
}

/// A CHAP name and its secret.
fn user(statement: &Statement) -> Option<ChapUser> {
    let (name, secret) = (statement.argument(0)?, statement.argument(1)?);
    ChapUser::of(Some(name.to_owned()), Some(ImportedSecret::new(secret)))
}

/// What a target says about its initiators.
#[derive(Default)]
struct Initiators {
    rules: AccessRules,
    /// One of its addresses is `ALL`.
    has_all: bool,
    target_user: Option<ChapUser>,
}

fn target(statement: &Statement, imported: &mut Imported) {
    let name = statement.argument(0).unwrap_or_default().to_owned();
    let mut target = ImportedTarget { name, ..ImportedTarget::default() };
    let mut initiators = Initiators::default();
    // Options of LUNs that are directly in the target are those of all its LUNs.
    let is_lun = |own: &&Statement| ["backing-store", "direct-store"].contains(&own.keyword());
    let is_option = |own: &&Statement| {
        let keyword = own.keyword();
        (LUN_OPTIONS.contains(&keyword) || begins(keyword, &["readonly"])) && !own.is_block
    };
    let shared: Vec<&Statement> = statement.below.iter().filter(is_option).collect();
    let mut luns: Vec<&Statement> = statement.below.iter().filter(is_lun).collect();
    // Given numbers are taken first; then tgt-admin numbers all backing stores, and then the rest.
    luns.sort_by_key(|lun| (lun_number(lun).is_none(), lun.keyword() == "direct-store"));
    let tid = statement.below.iter().find(|own| own.keyword() == "controller_tid");
    let tid = tid.and_then(|own| own.argument(0)?.parse().ok());
    for lun in luns {
        logical_unit(lun, &shared, tid, &mut target, imported);
    }
    let others = statement.below.iter().filter(|own| !is_lun(own) && !is_option(own));
    others.for_each(|own| setting(own, &mut target, &mut initiators));
    access(&mut target, initiators);
    imported.targets.push(target);
}

fn setting(statement: &Statement, target: &mut ImportedTarget, initiators: &mut Initiators) {
    let (keyword, value) = (statement.keyword(), statement.value());
    let notes = &mut target.notes;
    match keyword {
        "driver" if value == "iscsi" => {}
        "driver" if value == "iser" => {
            target.portals.push(ImportedPortal { address: ISER.to_owned(), tag: None });
        }
        "initiator-name" => initiators.rules.add_name(&value, notes),
        "initiator-address" if value.eq_ignore_ascii_case("all") => initiators.has_all = true,
        "initiator-address" => initiators.rules.add_network(keyword, &value, notes),
        "incominguser" => {
            let chap = user(statement).map(|user| ImportedChap { user, target: None });
            initiators.rules.add_user(keyword, chap, notes);
        }
        "outgoinguser" => match user(statement) {
            Some(user) => initiators.target_user = Some(user),
            None => notes.setting(keyword, &value),
        },
        "controller_tid" | "allow-in-use" => {}
        _ if parameters::set(target, keyword, &value) => {}
        _ => {
            let words = ["initiator", "incominguser"];
            initiators.rules.add_unknown(keyword, &value, &words, &mut target.notes);
        }
    }
}

/// A target without addresses and names is open to all; with both, an initiator needs both.
fn access(target: &mut ImportedTarget, initiators: Initiators) {
    let Initiators { mut rules, has_all, target_user } = initiators;
    if has_all {
        rules.admit_all_networks();
    }
    rules.set_target_user(target_user.as_ref());
    (target.acl, target.allow) = rules.settle(&mut target.notes);
}

fn lun_number(statement: &Statement) -> Option<u64> {
    let own = statement.below.iter().find(|own| own.keyword() == "lun")?;
    own.argument(0)?.parse().ok()
}

/// What is said about a logical unit.
#[derive(Default)]
struct UnitOptions {
    storage: StorageOptions,
    is_read_only: bool,
    /// A back end that is no file or device.
    foreign: Option<String>,
    identity: ScsiIdentity,
    notes: Notes,
}

fn logical_unit(
    statement: &Statement,
    shared: &[&Statement],
    tid: Option<u32>,
    target: &mut ImportedTarget,
    imported: &mut Imported,
) {
    // A path with blanks needs no quotes.
    let path = statement.value();
    let path = path.as_str();
    let mut options = UnitOptions::default();
    for own in shared.iter().copied().chain(&statement.below) {
        unit_option(own, &mut options);
    }
    let is_direct = statement.keyword() == "direct-store";
    if is_direct {
        options.notes.lost("direct-store: it showed the identity of the device");
    }
    if path.is_empty() {
        return target.notes.lost("a backing store without a path");
    }
    if let Some(kind) = options.foreign {
        return target.notes.lost(format!("backing store {path} of {kind}"));
    }
    let spec = specs::of_path(path, options.storage, &mut options.notes);
    let lun = lun_number(statement).unwrap_or_else(|| target.luns.next_free(1));
    // One file in several targets is one volume.
    let known = imported.volumes.iter().find(|volume| volume.spec == spec).map(|volume| volume.name.clone());
    let name = known.unwrap_or_else(|| {
        let stem = Path::new(path).file_stem().unwrap_or_default().to_string_lossy();
        let mut volume = ImportedVolume::new(imported.free_name(&stem), spec);
        let given = options.identity;
        volume.identity = if is_direct { given } else { with_defaults(given, tid, lun) };
        if volume.identity.t10.is_none() && !is_direct {
            options.notes.remark(
                "tgt derived the designators of this unit from the number of its target, which is not in the file: to \
                 keep names by them, set naa as an initiator shows it",
            );
        }
        volume.notes.append(&mut options.notes);
        imported.volumes.push(volume);
        imported.volumes.last().map(|volume| volume.name.clone()).unwrap_or_default()
    });
    target.luns.insert(lun, &name, options.is_read_only, &mut target.notes);
}

/// Completes the identity of a unit by tgt's defaults. Those of its serial number and its
/// designators contain the number of the target, which tgt-admin chooses if the config has none.
fn with_defaults(given: ScsiIdentity, tid: Option<u32>, lun: u64) -> ScsiIdentity {
    let scsi_id = given.t10.or_else(|| tid.map(|tid| format!("IET     {tid:04x}{lun:04x}")));
    ScsiIdentity {
        vendor: given.vendor.or(Some("IET".to_owned())),
        product: given.product.or(Some("VIRTUAL-DISK".to_owned())),
        revision: given.revision.or(Some("0001".to_owned())),
        serial: given.serial.or_else(|| tid.map(|tid| format!("beaf{tid}{lun}"))),
        naa: scsi_id.as_deref().map(tgt_naa),
        t10: scsi_id,
        eui64: None,
    }
}

fn unit_option(statement: &Statement, options: &mut UnitOptions) {
    let (keyword, value) = (statement.keyword(), statement.value());
    let UnitOptions { storage, is_read_only, foreign, identity, notes } = options;
    // tgtadm cuts what is longer than its field.
    let cut = |len: usize| Some(value.chars().take(len).collect::<String>());
    match (keyword, value.as_str()) {
        ("lun" | "allow-in-use" | "sense_format" | "online", _) => {}
        ("vendor_id", _) => identity.vendor = cut(8),
        ("product_id", _) => identity.product = cut(16),
        ("product_rev", _) => identity.revision = cut(4),
        ("scsi_sn", _) => identity.serial = cut(36),
        ("scsi_id", _) => identity.t10 = cut(36),
        ("readonly", "1" | "yes" | "on") => *is_read_only = true,
        ("readonly" | "removable", "0" | "no" | "off") => {}
        ("write-cache", "on") | ("bs-type", "rdwr" | "aio") | ("device-type", "disk") => {}
        ("bsoflags", flags) if flags.split([',', ' ']).all(|flag| flag == "direct") => {
            storage.direct = Some(true);
        }
        ("bs-type", kind) => *foreign = Some(format!("bs-type {kind}")),
        ("device-type", kind) => *foreign = Some(format!("device-type {kind}")),
        ("block-size", size) => match size.parse() {
            Ok(size) => storage.block_size = Some(size),
            Err(_) => notes.setting(keyword, size),
        },
        _ => {
            // Initiators may not write where they perhaps could not before.
            *is_read_only |= begins(keyword, &["readonly"]);
            notes.setting(keyword, &value);
        }
    }
}

/// Options of logical units.
const LUN_OPTIONS: [&str; 19] = [
    "allow-in-use",
    "block-size",
    "bs-type",
    "bsoflags",
    "bsopts",
    "device-type",
    "lun",
    "mode_page",
    "online",
    "params",
    "path",
    "product_id",
    "product_rev",
    "readonly",
    "removable",
    "scsi_id",
    "scsi_sn",
    "vendor_id",
    "write-cache",
];
/// Stands for the portals of a target over iSER until all are known.
const ISER: &str = "iser";
/// Maximum number of included files.
const MAX_FILES: usize = 1024;
/// Maximum number of files that include each other, which the stack has to hold.
const MAX_DEPTH: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn included_files_are_read_in_order_and_a_circle_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let there = |name: &str| directory.path().join(name);
        fs::create_dir(there("conf.d")).unwrap();
        for (name, text) in [
            ("targets.conf", "include conf.d/*.conf\ninclude missing.conf\n"),
            ("conf.d/b.conf", "<target iqn.b>\nbacking-store /srv/b\n</target>"),
            ("conf.d/a.conf", "<target iqn.a>\nbacking-store /srv/a\n</target>"),
            ("conf.d/a.conf.bak", "<"),
            ("circle.conf", "\ninclude circle.conf\n"),
        ] {
            fs::write(there(name), text).unwrap();
        }
        let imported = read(&SourceText::read(&there("targets.conf")).unwrap()).ok().unwrap();
        assert_eq!(
            imported.targets.iter().map(|target| &target.name).collect::<Vec<_>>(),
            ["iqn.a", "iqn.b"]
        );
        assert!(
            imported.notes.lines().any(|line| line == "# include missing.conf: there is no such file here")
        );
        let said = read(&SourceText::read(&there("circle.conf")).unwrap()).err().unwrap().to_string();
        assert!(said.ends_with("circle.conf:2: there are too many included files, or they form a circle"));
    }
}
