//! Folders of one crate must depend on each other in one direction only.
//!
//! The modules of a folder are the nodes of a graph; every path in their product code (`use` or
//! inline) from one to another is an edge. A cycle that two folders are part of is a finding:
//! neither can be read, tested or replaced without the other. Files within one folder may use each
//! other.

use super::imports::{ImportSite, is_module, module_path, resolve, used};
use super::modules::test_files;
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

/// Edges between the modules of one folder: the using and the used module, and the first place.
type Graph = BTreeMap<String, BTreeMap<String, ImportSite>>;

/// The graph of each folder of each crate, by the folder's path.
fn graphs(tree: &Tree) -> BTreeMap<String, Graph> {
    let tests = test_files(tree);
    let mut graphs: BTreeMap<String, Graph> = BTreeMap::new();
    for (path, source) in tree.ending(".rs").filter(|(path, _)| !tests.contains(*path)) {
        let Some((root, file)) = path.split_once("/src/") else { continue };
        let module = module_path(file);
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
