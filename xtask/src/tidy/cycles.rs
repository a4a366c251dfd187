//! Folders of one crate must depend on each other in one direction only.
//!
//! The modules of a folder are the nodes of a graph; every path in their product code (`use` or
//! inline) from one to another is an edge. A cycle that two folders are part of is a finding:
//! neither can be read, tested or replaced without the other. Files within one folder may use each
//! other.

use super::modules::test_files;
use super::source::{code, is_word, test_lines};
use super::{Finding, Tree};
use std::collections::{BTreeMap, BTreeSet};

/// Reports pairs of folders that use each other, each pair once.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let graphs = graphs(tree);
    let mut findings = Vec::new();
    for (parent, graph) in &graphs {
        let folders: Vec<&String> = graph.keys().filter(|name| is_folder(tree, parent, name)).collect();
        for (at, &one) in folders.iter().enumerate() {
            for &other in &folders[at + 1..] {
                if let (Some(there), Some(_)) = (first_step(graph, one, other), first_step(graph, other, one))
                {
                    let what = format!(
                        "folders `{one}` and `{other}` depend on each other; move their common part to a third module"
                    );
                    findings.push(Finding::new(&there.path, there.line, what));
                }
            }
        }
    }
    findings
}

/// Where a module uses another one.
#[derive(Clone)]
struct ImportSite {
    path: String,
    line: usize,
}

/// Edges between the modules of one folder: the using and the used module, and the first place.
type Graph = BTreeMap<String, BTreeMap<String, ImportSite>>;

/// The graph of each folder of each crate, by the folder's path.
fn graphs(tree: &Tree) -> BTreeMap<String, Graph> {
    let tests = test_files(tree);
    let mut graphs: BTreeMap<String, Graph> = BTreeMap::new();
    for (path, source) in tree.ending(".rs").filter(|(path, _)| !tests.contains(*path)) {
        let Some((root, file)) = path.split_once("/src/") else { continue };
        let module = module(file);
        for (line, used) in used(source) {
            let Some(used) = resolve(&module, &used) else { continue };
            let shared = module.iter().zip(&used).take_while(|(own, other)| own == other).count();
            let (Some(from), Some(to)) = (module.get(shared), used.get(shared)) else { continue };
            let parent = [&[format!("{root}/src")], &module[..shared]].concat().join("/");
            if is_module(tree, &parent, to) {
                let edges = graphs.entry(parent).or_default();
                let place = ImportSite { path: path.to_owned(), line };
                edges.entry(from.clone()).or_default().entry(to.clone()).or_insert(place);
                edges.entry(to.clone()).or_default();
            }
        }
    }
    graphs
}

/// The module path of `file` from the crate's root.
fn module(file: &str) -> Vec<String> {
    let mut names: Vec<String> = file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    if names.last().is_some_and(|last| last == "mod") || names == ["lib"] || names == ["main"] {
        names.pop();
    }
    names
}

/// Every path in product code that begins with `crate`, `self` or `super`, with its line from 1.
/// Groups are expanded.
fn used(source: &str) -> Vec<(usize, Vec<String>)> {
    let tests = test_lines(source);
    let code = code(source);
    let mut paths = Vec::new();
    let mut at = 0;
    while let Some(found) = code[at..].find(is_word) {
        let start = at + found;
        let word = word(&code[start..]);
        at = start + word.len();
        let continues = code[..start].ends_with("::");
        if matches!(word, "crate" | "self" | "super") && code[at..].starts_with("::") && !continues {
            let line = code[..start].matches('\n').count();
            let mut group = Vec::new();
            at += tails(&code[at..], &[word.to_owned()], &mut group);
            if !tests.iter().any(|test| test.contains(&line)) {
                paths.extend(group.into_iter().map(|path| (line + 1, path)));
            }
        }
    }
    paths
}

/// Parses what follows the start of a path, `::name` or `::{...}`, and returns its length.
fn tails(text: &str, head: &[String], paths: &mut Vec<Vec<String>>) -> usize {
    let Some(rest) = text.strip_prefix("::") else {
        paths.push(head.to_owned());
        return 0;
    };
    let Some(group) = rest.strip_prefix('{') else {
        let name = word(rest);
        return 2 + name.len() + tails(&rest[name.len()..], &[head, &[name.to_owned()]].concat(), paths);
    };
    let mut at = 0;
    while let Some(next) = group[at..].chars().next() {
        if next == '}' {
            break;
        }
        let name = word(&group[at..]);
        at += match name {
            "" => next.len_utf8(),
            _ => name.len() + tails(&group[at + name.len()..], &[head, &[name.to_owned()]].concat(), paths),
        };
    }
    2 + 1 + at + 1
}

/// The word at the start of `text`, or an empty string.
fn word(text: &str) -> &str {
    &text[..text.find(|c| !is_word(c)).unwrap_or(text.len())]
}

/// A path in `module` as names from the crate's root; `None` if it leaves the crate.
fn resolve(module: &[String], path: &[String]) -> Option<Vec<String>> {
    let (first, rest) = path.split_first()?;
    let ups = rest.iter().take_while(|name| *name == "super").count();
    let own = match first.as_str() {
        "crate" => &[],
        "super" => module.get(..module.len().checked_sub(1 + ups)?)?,
        _ => module.get(..module.len().checked_sub(ups)?)?,
    };
    Some([own, rest.get(ups..)?].concat())
}

fn is_module(tree: &Tree, parent: &str, name: &str) -> bool {
    tree.has(&format!("{parent}/{name}.rs")) || tree.has(&format!("{parent}/{name}/mod.rs"))
}

fn is_folder(tree: &Tree, parent: &str, name: &str) -> bool {
    let folder = format!("{parent}/{name}/");
    tree.all().any(|(path, _)| path.starts_with(&folder))
}

/// The first edge of a path in the graph from one module to another, if there is one.
fn first_step<'a>(graph: &'a Graph, from: &str, to: &str) -> Option<&'a ImportSite> {
    let reaches = |name: &str| {
        let (mut seen, mut left) = (BTreeSet::new(), vec![name.to_owned()]);
        while let Some(name) = left.pop() {
            if name != from && seen.insert(name.clone()) {
                left.extend(graph.get(&name).into_iter().flat_map(BTreeMap::keys).cloned());
            }
        }
        seen.contains(to)
    };
    graph.get(from)?.iter().find(|(next, _)| reaches(next)).map(|(_, place)| place)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{places, tree};
    use super::*;

    #[test]
    fn two_folders_that_use_each_other_are_found_at_the_first_use() {
        let files = [
            ("crates/a/src/lib.rs", "mod b;\nmod c;\nmod d;\nuse crate::c::C;\n"),
            ("crates/a/src/b/mod.rs", "mod e;\n"),
            ("crates/a/src/b/e.rs", "\nuse crate::{x, c::{C, D}};\n"),
            ("crates/a/src/c.rs", "use super::d::D;\n"),
            ("crates/a/src/c/f.rs", ""),
            ("crates/a/src/d.rs", "fn f() { super::b::g() }\n"),
        ];
        let findings = check(&tree(&files));
        assert_eq!(places(&findings), [("crates/a/src/b/e.rs", 2)]);
        assert!(findings[0].what.starts_with("folders `b` and `c` "));
    }

    #[test]
    fn one_direction_tests_and_files_of_one_folder_are_not_a_cycle() {
        let files = [
            ("crates/a/src/lib.rs", "mod b;\nmod c;\n"),
            ("crates/a/src/b/mod.rs", "mod e;\nmod f;\n#[cfg(test)]\nmod tests {\n    use crate::c::C;\n}\n"),
            ("crates/a/src/b/e.rs", "use super::f::F; // crate::c::C\n"),
            ("crates/a/src/b/f.rs", "use super::e::E;\n"),
            ("crates/a/src/c/mod.rs", "use crate::b::{self, B as C};\nuse self::g::G;\nmod g;\n"),
            ("crates/a/src/c/g.rs", "use super::super::b::e::E;\n"),
        ];
        assert_eq!(places(&check(&tree(&files))), []);
    }
}
