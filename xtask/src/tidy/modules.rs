//! Unreachable files and undocumented modules.

use super::source::{code, is_test_cfg};
use super::{Finding, Tree};
use std::collections::BTreeSet;

/// Reports sources without a `mod` line, which cargo never compiles.
pub(super) fn dead_sources(tree: &Tree) -> Vec<Finding> {
    let mut live = BTreeSet::new();
    for (path, _) in tree.ending(".rs").filter(|(path, _)| is_root(path)) {
        reach(tree, path, &mut live);
    }
    let dead = tree.ending(".rs").filter(|(path, _)| path.contains("/src/") && !live.contains(*path));
    dead.map(|(path, _)| Finding::new(path, 1, "no `mod` line leads here; add one or remove the file"))
        .collect()
}

/// Reports sources in a folder named `target`, which ignore lists, editors and search tools treat
/// as build output.
pub(super) fn hidden_sources(tree: &Tree) -> Vec<Finding> {
    let hidden = tree.ending(".rs").filter(|(path, _)| path.contains("/target/"));
    hidden.map(|(path, _)| Finding::new(path, 1, "in a folder named `target`; rename the folder")).collect()
}

/// Reports modules in a file beside their folder; all modules with a folder are its `mod.rs`.
pub(super) fn beside_folder(tree: &Tree) -> Vec<Finding> {
    let sources = tree.ending(".rs").filter(|(path, _)| path.contains("/src/"));
    let beside = sources.filter_map(|(path, _)| {
        let folder = path.trim_end_matches(".rs");
        tree.has(folder).then(|| Finding::new(path, 1, format!("has a folder; move it to {folder}/mod.rs")))
    });
    beside.collect()
}

/// Reports modules without a module doc.
pub(super) fn undocumented(tree: &Tree) -> Vec<Finding> {
    let silent = tree.ending(".rs").filter(|(_, source)| !source.starts_with("//!"));
    silent.map(|(path, _)| Finding::new(path, 1, "no module doc; begin the file with a `//!` line")).collect()
}

/// Reports test data that no test uses.
pub(super) fn dead_data(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, _) in tree.all().filter(|(path, _)| path.contains(DATA) || path.starts_with(&DATA[1..])) {
        let name = path.rsplit('/').next().unwrap_or(path);
        let is_named = tree.ending(".rs").chain(tree.ending(".md")).any(|(_, text)| text.contains(name));
        if !is_named {
            findings.push(Finding::new(path, 1, "no test names this file; use it or remove it"));
        }
    }
    findings
}

/// Files that contain only tests: in `tests` directories, and modules under a `cfg` with `test`.
pub(super) fn test_files(tree: &Tree) -> BTreeSet<String> {
    let mut tests = BTreeSet::new();
    for (path, source) in tree.ending(".rs") {
        if path.starts_with("tests/") || path.contains("/tests/") || path.contains("/benches/") {
            tests.insert(path.to_owned());
        }
        for module in modules(path, source).into_iter().filter(|module| module.is_test) {
            for path in module.files.iter().filter(|path| tree.has(path)) {
                reach(tree, path, &mut tests);
            }
        }
    }
    tests
}

/// A `mod` line without a body.
struct Module {
    /// Possible paths of its source.
    files: Vec<String>,
    is_test: bool,
}

/// Whether the file is a crate root.
fn is_root(path: &str) -> bool {
    path.ends_with("/src/lib.rs") || path.ends_with("/src/main.rs") || path.contains("/src/bin/")
}

fn reach(tree: &Tree, path: &str, live: &mut BTreeSet<String>) {
    let Some(source) = tree.0.get(path) else { return };
    if live.insert(path.to_owned()) {
        for module in modules(path, source) {
            module.files.iter().for_each(|path| reach(tree, path, live));
        }
    }
}

/// The modules that a source declares in files of their own.
fn modules(path: &str, source: &str) -> Vec<Module> {
    let mut modules = Vec::new();
    let (mut is_test, mut named) = (false, None);
    for (line, code) in source.lines().zip(code(source).lines()) {
        let code = code.trim();
        if code.starts_with("#[") {
            is_test |= is_test_cfg(line);
            named = line.trim().strip_prefix("#[path = \"").and_then(|rest| rest.split('"').next()).or(named);
        } else if let Some(name) = declared(code) {
            let directory = directory(path, named.is_some());
            let files = match named {
                Some(file) => vec![format!("{directory}/{file}")],
                None => vec![format!("{directory}/{name}.rs"), format!("{directory}/{name}/mod.rs")],
            };
            modules.push(Module { files, is_test });
            (is_test, named) = (false, None);
        } else if !code.is_empty() {
            (is_test, named) = (false, None);
        }
    }
    modules
}

/// The name in `mod NAME;`, with any visibility.
fn declared(code: &str) -> Option<&str> {
    let (visibility, name) = code.strip_suffix(';')?.rsplit_once("mod ")?;
    let visibility = visibility.trim();
    (visibility.is_empty() || visibility.starts_with("pub")).then(|| name.trim())
}

/// Directory of the modules that the source at `path` declares.
fn directory(path: &str, has_path: bool) -> String {
    let (directory, name) = path.rsplit_once('/').unwrap_or(("", path));
    let stem = name.trim_end_matches(".rs");
    if has_path
        || is_root(path)
        || stem == "mod"
        || path.contains("/tests/") && !directory.contains("/tests/")
    {
        directory.to_owned()
    } else {
        format!("{directory}/{stem}")
    }
}

/// Directory of test data in any package.
const DATA: &str = "/tests/data/";

#[cfg(test)]
mod tests {
    use super::super::tests::{places, tree};
    use super::*;

    #[test]
    fn no_source_is_in_a_folder_that_tools_ignore() {
        let files = [("crates/a/src/target/b.rs", ""), ("crates/a/src/target.rs", "")];
        assert_eq!(places(&hidden_sources(&tree(&files))), [("crates/a/src/target/b.rs", 1)]);
    }

    #[test]
    fn a_module_with_a_folder_is_its_mod_rs() {
        let files = [
            ("crates/a/src/b.rs", ""),
            ("crates/a/src/b/c.rs", ""),
            ("crates/a/src/d/mod.rs", ""),
            ("crates/a/tests/e.rs", ""),
            ("crates/a/tests/e/f.rs", ""),
        ];
        assert_eq!(places(&beside_folder(&tree(&files))), [("crates/a/src/b.rs", 1)]);
    }

    #[test]
    fn a_file_is_alive_when_mod_lines_lead_to_it() {
        let files = [
            ("crates/a/src/lib.rs", "pub mod b;\n// mod dead;\n#[path = \"odd.rs\"]\nmod d;\n"),
            ("crates/a/src/b.rs", "pub(crate) mod c;\n"),
            ("crates/a/src/b/c/mod.rs", "mod e;\n"),
            ("crates/a/src/b/c/e.rs", ""),
            ("crates/a/src/odd.rs", ""),
            ("crates/a/src/dead.rs", ""),
            ("crates/a/src/c.rs", ""),
            ("crates/a/src/bin/tool.rs", ""),
        ];
        let findings = dead_sources(&tree(&files));
        assert_eq!(places(&findings), [("crates/a/src/c.rs", 1), ("crates/a/src/dead.rs", 1)]);
    }

    #[test]
    fn a_source_begins_with_what_it_is() {
        let findings = undocumented(&tree(&[("a.rs", "//! A.\n"), ("b.rs", "use a;\n")]));
        assert_eq!(places(&findings), [("b.rs", 1)]);
    }

    #[test]
    fn data_is_named_by_a_test() {
        let files = [
            ("crates/a/tests/data/used.bin", ""),
            ("tests/data/unused.bin", ""),
            ("crates/a/tests/read.rs", "include_bytes!(\"data/used.bin\")"),
        ];
        assert_eq!(places(&dead_data(&tree(&files))), [("tests/data/unused.bin", 1)]);
    }

    #[test]
    fn a_module_under_a_test_cfg_is_tests_with_all_below_it() {
        let files = [
            ("crates/a/src/lib.rs", "#[cfg(test)]\nmod pair;\nmod session;\n"),
            ("crates/a/src/pair.rs", "mod split;\n"),
            ("crates/a/src/pair/split.rs", ""),
            ("crates/a/src/session.rs", ""),
            ("crates/a/tests/interop.rs", ""),
        ];
        let tests = test_files(&tree(&files));
        let expected = ["crates/a/src/pair.rs", "crates/a/src/pair/split.rs", "crates/a/tests/interop.rs"];
        assert!(tests.iter().eq(&expected));
    }
}
