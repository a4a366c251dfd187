//! Files of one crate do not use each other in circles.
//!
//! A path in product code (`use` or inline) from one file to another is an edge; a name that a
//! module re-exports leads to the file that has it. A `mod.rs` and the files below it are one
//! module, so edges between them do not count.

use super::imports::{ImportSite, exported, module_path, resolve, used};
use super::modules::test_files;
use super::{Finding, Tree};
use std::collections::{BTreeMap, BTreeSet};

/// Reports circles that are not in [`KNOWN`], and files of that list that are in no circle.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    check_with(tree, KNOWN)
}

fn check_with(tree: &Tree, known: &[KnownCircle]) -> Vec<Finding> {
    let mut left: Vec<(BTreeSet<String>, &KnownCircle)> =
        known.iter().map(|circle| (circle.paths(), circle)).collect();
    let mut findings = Vec::new();
    for graph in graphs(tree).values() {
        for circle in circles(graph) {
            match left.iter_mut().find(|(files, _)| circle.is_subset(files)) {
                Some((files, _)) => files.retain(|file| !circle.contains(file)),
                None => findings.push(finding(graph, &circle)),
            }
        }
    }
    for (files, circle) in left {
        for file in files {
            let what = format!(
                "{file} is no longer in the circle `{}` of {}; remove it from the list",
                circle.files, circle.folder
            );
            findings.push(Finding::new(LIST, 1, what));
        }
    }
    findings
}

/// A circle that is known.
struct KnownCircle {
    folder: &'static str,
    /// The files below the folder, without `.rs`.
    files: &'static str,
    /// Why the circle is not cut.
    #[allow(dead_code, reason = "for the reader of the list")]
    reason: &'static str,
}

impl KnownCircle {
    fn paths(&self) -> BTreeSet<String> {
        self.files.split(' ').map(|file| format!("{}/{file}.rs", self.folder)).collect()
    }
}

const LIST: &str = "xtask/src/tidy/circles.rs";

/// The circles that are left. This list only becomes shorter: a new circle is cut instead.
const KNOWN: &[KnownCircle] = &[
    KnownCircle {
        folder: "crates/blockmux/src/cli/bench",
        files: "case linked plan",
        reason: "a plan makes cases, and a case is printed with its plan",
    },
    KnownCircle {
        folder: "crates/blockmux/src/protocol",
        files: "descriptor frontend listeners policy",
        reason: "a protocol has a frontend, which serves the protocol's listeners by the policy",
    },
    KnownCircle {
        folder: "crates/blockmux/src/protocol/iscsi",
        files: "live node",
        reason: "live targets are made from nodes of the config",
    },
    KnownCircle {
        folder: "crates/blockmux/src/protocol/nvme_tcp",
        files: "config hosts",
        reason: "a subsystem has hosts, and a host is of a subsystem",
    },
    KnownCircle {
        folder: "crates/blockmux/src/daemon",
        files: "config identity opening setup sources",
        reason: "one config, read in steps",
    },
    KnownCircle {
        folder: "crates/blockmux/src/daemon",
        files: "control reload/mod",
        reason: "both change the running config",
    },
    KnownCircle {
        folder: "crates/engine/src/core/reactor",
        files: "core inbox",
        reason: "a core has an inbox, and messages run on the core",
    },
    KnownCircle {
        folder: "crates/proto/src/fabrics/controller",
        files: "commands fused queue transport unstarted",
        reason: "one state machine: a queue and its commands",
    },
    KnownCircle {
        folder: "crates/proto/src/fabrics/host",
        files: "access delayed namespace_queue",
        reason: "one state machine: a queue and its paths",
    },
    KnownCircle {
        folder: "crates/proto/src/iscsi/client",
        files: "abort burst connection full receive",
        reason: "one state machine: a session and its connections",
    },
    KnownCircle {
        folder: "crates/proto/src/iscsi",
        files: "digests login/failure login/joinable login/keys login/operational login/rdma login/security login/target node sender",
        reason: "one negotiation, whose keys each part declares",
    },
    KnownCircle {
        folder: "crates/proto/src/iscsi/server",
        files: "answer command connection connection_table full local negotiation receive replies request retained shared",
        reason: "one state machine: a session and its connections (decision 49)",
    },
    KnownCircle {
        folder: "crates/proto/src/nbd/client",
        files: "head reply request transmission",
        reason: "one state machine: a request and its reply",
    },
    KnownCircle {
        folder: "crates/proto/src/nbd/server",
        files: "long_write pending reply request transmission",
        reason: "one state machine: a request and its reply",
    },
    KnownCircle {
        folder: "crates/proto/src/nvme",
        files: "ana fused io ranges reservation subsystem",
        reason: "commands act on namespaces, which report their changes",
    },
    KnownCircle {
        folder: "crates/proto/src/scsi/device",
        files: "alua extended_copy missed open_nexus sanitize target task token_copy/mod tokens unit units view",
        reason: "commands act on units of a target, which start commands in the background",
    },
    KnownCircle {
        folder: "crates/proto/src/scsi/device",
        files: "inquiry report table vpd",
        reason: "the table names the functions, which report the table",
    },
    KnownCircle {
        folder: "crates/proto/src/scsi/initiator",
        files: "access changes plan queue",
        reason: "one state machine: a queue and its unit",
    },
    KnownCircle {
        folder: "crates/volume/src",
        files: "buf/mod crc32c io pool sg_list volume",
        reason: "memory belongs to a pool, whose limits follow from the requests that use it",
    },
];

/// The used files of each file, and the first place.
type Graph = BTreeMap<String, BTreeMap<String, ImportSite>>;

/// The files of a crate by the path of their module, and what each module re-exports.
#[derive(Default)]
struct CrateFiles {
    files: BTreeMap<Vec<String>, String>,
    exports: BTreeMap<Vec<String>, Vec<Vec<String>>>,
}

impl CrateFiles {
    /// The module that has what a path from the crate's root names.
    fn owner(&self, path: &[String], depth: usize) -> Option<&[String]> {
        let len = (0..=path.len()).rev().find(|len| self.files.contains_key(&path[..*len]))?;
        let (module, rest) = path.split_at(len);
        let exported = self.exports.get(module).into_iter().flatten();
        let export = exported.filter(|export| rest.first() == export.last()).find(|export| *export != path);
        match (export, rest) {
            (Some(export), [_, rest @ ..]) if depth < MAX_EXPORTS => {
                self.owner(&[export, rest].concat(), depth + 1)
            }
            _ => self.files.get_key_value(module).map(|(module, _)| module.as_slice()),
        }
    }
}

/// Re-exports that a name may pass.
const MAX_EXPORTS: usize = 8;

/// The graph of each crate, by the path of its sources.
fn graphs(tree: &Tree) -> BTreeMap<String, Graph> {
    let tests = test_files(tree);
    let mut crates: BTreeMap<&str, CrateFiles> = BTreeMap::new();
    for (path, source) in tree.ending(".rs").filter(|(path, _)| !tests.contains(*path)) {
        let Some((root, file)) = path.split_once("/src/") else { continue };
        let module = module_path(file);
        let exports = exported(source).into_iter().filter_map(|path| match path.first()?.as_str() {
            "crate" | "super" => resolve(&module, &path),
            _ => Some([module.clone(), path].concat()),
        });
        let files = crates.entry(root).or_default();
        files.exports.insert(module.clone(), exports.collect());
        files.files.insert(module, path.to_owned());
    }
    let graphs = crates.into_iter().map(|(root, files)| {
        let edges =
            files.files.iter().map(|(module, path)| (path.clone(), edges(tree, &files, module, path)));
        (root.to_owned(), edges.collect())
    });
    graphs.collect()
}

/// The files that a file uses, without those of its own folders.
fn edges(tree: &Tree, files: &CrateFiles, module: &[String], path: &str) -> BTreeMap<String, ImportSite> {
    let mut edges = BTreeMap::new();
    let source = tree.content(path);
    for (line, used) in used(source) {
        let owner = resolve(module, &used).and_then(|used| files.owner(&used, 0));
        let Some(owner) = owner.filter(|owner| !owner.starts_with(module) && !module.starts_with(owner))
        else {
            continue;
        };
        let site = ImportSite { path: path.to_owned(), line };
        edges.entry(files.files[owner].clone()).or_insert(site);
    }
    edges
}

/// The circles of a graph: the largest sets of files that all reach each other.
fn circles(graph: &Graph) -> Vec<BTreeSet<String>> {
    let reached: BTreeMap<&String, BTreeSet<&String>> =
        graph.keys().map(|file| (file, reach(graph, file))).collect();
    let mut circles: BTreeSet<BTreeSet<String>> = BTreeSet::new();
    for (file, reached_files) in &reached {
        let mutual =
            reached_files.iter().filter(|other| reached.get(**other).is_some_and(|r| r.contains(file)));
        let circle: BTreeSet<String> = mutual.map(|file| (*file).clone()).collect();
        if !circle.is_empty() {
            circles.insert(circle);
        }
    }
    circles.into_iter().collect()
}

/// The files that a file uses, directly or not.
fn reach<'a>(graph: &'a Graph, file: &String) -> BTreeSet<&'a String> {
    let (mut seen, mut left) = (BTreeSet::new(), vec![file]);
    while let Some(file) = left.pop() {
        for used in graph.get(file).into_iter().flat_map(BTreeMap::keys) {
            if seen.insert(used) {
                left.push(used);
            }
        }
    }
    seen
}

/// Reports a circle at its first file, with the places that make it.
fn finding(graph: &Graph, circle: &BTreeSet<String>) -> Finding {
    let sites = circle.iter().flat_map(|file| {
        let used = graph[file].iter().filter(|(used, _)| circle.contains(*used));
        used.map(|(used, site)| format!("{}:{} uses {}", short(&site.path), site.line, short(used)))
    });
    let sites: Vec<String> = sites.collect();
    let what = format!("files use each other in a circle; move what they share: {}", sites.join(", "));
    let first = circle.first().map_or(LIST, String::as_str);
    let line = graph.get(first).and_then(|edges| edges.iter().find(|(used, _)| circle.contains(*used)));
    Finding::new(first, line.map_or(1, |(_, site)| site.line), what)
}

/// A path without its crate.
fn short(path: &str) -> &str {
    path.split_once("/src/").map_or(path, |(_, file)| file)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{places, tree};
    use super::*;

    const CIRCLE: &[(&str, &str)] = &[
        ("crates/a/src/lib.rs", "mod b;\nmod c;\nmod d;\n"),
        ("crates/a/src/b.rs", "use crate::{c::C, d::D};\n"),
        ("crates/a/src/c/mod.rs", "mod e;\npub(crate) use self::e::{C, E};\nuse super::d::D;\n"),
        ("crates/a/src/c/e.rs", "use super::F;\n\nuse crate::b::B;\n"),
        ("crates/a/src/d.rs", "#[cfg(test)]\nmod tests {\n    use crate::b::B;\n}\n"),
    ];

    #[test]
    fn a_circle_is_found_through_a_re_export_and_neither_in_tests_nor_within_a_module() {
        let findings = check_with(&tree(CIRCLE), &[]);
        assert_eq!(places(&findings), [("crates/a/src/b.rs", 1)]);
        assert!(findings[0].what.ends_with("b.rs:1 uses c/e.rs, c/e.rs:3 uses b.rs"), "{}", findings[0]);
    }

    #[test]
    fn a_known_circle_is_no_finding_and_a_file_that_left_it_is_one() {
        let known = |files| KnownCircle { folder: "crates/a/src", files, reason: "" };
        assert_eq!(check_with(&tree(CIRCLE), &[known("b c/e")]), []);
        let findings = check_with(&tree(CIRCLE), &[known("b c/e d")]);
        assert_eq!(places(&findings), [(LIST, 1)]);
        assert!(findings[0].what.starts_with("crates/a/src/d.rs is no longer"));
    }
}
