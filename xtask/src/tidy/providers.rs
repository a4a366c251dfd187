//! Providers of queue pairs are named only where they are implemented or chosen, so that a further
//! provider is one module and an entry of each table.

use super::modules::test_files;
use super::source::test_lines;
use super::{Finding, Tree};

/// Reports each product line that names a provider, in code or in a string. Comments may.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let tests = test_files(tree);
    let is_product = |path: &str| {
        path.starts_with("crates/")
            && path.contains("/src/")
            && !tests.contains(path)
            && !MAY.iter().any(|(prefix, _)| path.starts_with(prefix))
    };
    let mut findings = Vec::new();
    for (path, source) in tree.ending(".rs").filter(|(path, _)| is_product(path)) {
        let tests = test_lines(source);
        let is_code = |at: usize, line: &str| {
            !line.trim_start().starts_with("//") && !tests.iter().any(|lines| lines.contains(&at))
        };
        for (at, line) in source.lines().enumerate().filter(|(at, line)| is_code(*at, line)) {
            if let Some(name) = PROVIDERS.iter().find(|name| names(line, name)) {
                let what = format!("names the provider `{name}`; be generic over the fabric (decision 115)");
                findings.push(Finding::new(path, at + 1, what));
            }
        }
    }
    findings
}

/// Whether a line has a word that begins with this name: `Roce`, `has_roce` and `rdma=roce`, but
/// not `process`.
fn names(line: &str, name: &str) -> bool {
    let lower = line.to_ascii_lowercase();
    lower.match_indices(name).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let is_capital = line[at..].starts_with(|first: char| first.is_ascii_uppercase());
        let is_within = |before: char| before.is_ascii_alphabetic() && !is_capital;
        !before.is_some_and(|before| before.is_ascii_uppercase() || is_within(before))
    })
}

/// Names of providers, in lower case.
const PROVIDERS: &[&str] = &["iwarp", "roce", "verbs", "devicequeuepair"];

/// Path prefixes of files that name providers, each with its reason.
const MAY: &[(&str, &str)] = &[
    ("crates/wire/src/", "bytes of the standards"),
    ("crates/rdma/src/", "the providers"),
    ("crates/verbs/src/", "rdma-core"),
    ("crates/engine/src/fabric/", "the fabric of each provider, with its sockets or devices"),
    ("crates/proto/src/names/rdma.rs", "the names in URLs"),
    ("crates/blockmux/src/protocol/fabric/", "the table that chooses a fabric by its name"),
    ("crates/blockmux/src/cli/rdma.rs", "`blockmux rdma` lists the devices of rdma-core"),
    ("crates/blockmux/src/daemon/mod.rs", "the help of listeners"),
    ("crates/blockmux/src/cli/bench/mod.rs", "the help of `--rdma`"),
    ("crates/lab/src/suite.rs", "the name of a published study"),
];

#[cfg(test)]
mod tests {
    use super::super::tests::{places, tree};
    use super::*;

    #[test]
    fn a_provider_is_named_only_where_it_may_be() {
        let source = "// iWARP\nuse x::IwarpFabric;\nconst URL: &str = \"?rdma=iwarp\";\n\
            use x::RoceHost;\nlet has_roce = 1;\nuse x::verbs::Y;\nstatic THIS_PROCESS: process::Id = x;\n\
            #[cfg(test)]\nmod tests {\n    use x::Iwarp;\n}\n";
        let files = [
            ("crates/blockmux/src/protocol/srp/mod.rs", source),
            ("crates/engine/src/fabric/iwarp.rs", source),
            ("crates/engine/tests/sim_srp.rs", source),
            ("xtask/src/peers/srp.rs", source),
        ];
        let first = "crates/blockmux/src/protocol/srp/mod.rs";
        assert_eq!(places(&check(&tree(&files))), [2, 3, 4, 5, 6].map(|line| (first, line)));
    }
}
