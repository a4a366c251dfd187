//! Checks that the index of `docs/decisions/` lists each page with its number and title.

use super::{Finding, Tree};
use std::collections::BTreeMap;

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let pages: Vec<_> = tree
        .ending(".md")
        .filter_map(|(path, text)| Some((path.strip_prefix(FOLDER)?, text)))
        .filter(|(name, _)| *name != INDEX)
        .collect();
    let index = format!("{FOLDER}{INDEX}");
    let listed = tree.ending(&index).next().map_or("", |(_, text)| text);
    let is_listed = |entry: &str| listed.lines().any(|line| line.starts_with(entry));
    let mut numbers: BTreeMap<&str, &str> = BTreeMap::new();
    let mut findings = Vec::new();
    for (name, text) in pages {
        let number = name.get(..4).unwrap_or(name);
        let title = text.lines().next().unwrap_or_default();
        let path = format!("{FOLDER}{name}");
        let short = number.trim_start_matches('0');
        let Some(title) = title.strip_prefix(&format!("# {short}. ")) else {
            let what = format!("does not begin with the title `# {short}. ...`; number the page as its file");
            findings.push(Finding::new(&path, 1, what));
            continue;
        };
        if let Some(other) = numbers.insert(number, name) {
            findings.push(Finding::new(&path, 1, format!("has the number of {other}; take the next one")));
        }
        let entry = format!("| {short} | [{title}]({name}) |");
        if !is_listed(&entry) {
            let what = format!("add a line to {index} that begins with `{entry}`");
            findings.push(Finding::new(&path, 1, what));
        }
    }
    findings
}

const FOLDER: &str = "docs/decisions/";
const INDEX: &str = "README.md";

#[cfg(test)]
mod tests {
    use super::super::tests::tree;
    use super::*;

    #[test]
    fn a_page_that_the_index_lacks_or_that_has_another_number_is_found() {
        let index = ("docs/decisions/README.md", "| 1 | [A title](0001-a.md) | in one line | in force |\n");
        let first = ("docs/decisions/0001-a.md", "# 1. A title\n");
        assert_eq!(check(&tree(&[index, first])), []);
        assert_eq!(check(&tree(&[index, ("docs/decisions/0001-a.md", "# 1. Another title\n")])).len(), 1);
        assert_eq!(check(&tree(&[index, ("docs/decisions/0001-a.md", "# 2. A title\n")])).len(), 1);
        assert_eq!(check(&tree(&[index, first, ("docs/decisions/0002-b.md", "# 2. B\n")])).len(), 1);
        let twice = check(&tree(&[index, first, ("docs/decisions/0001-b.md", "# 1. B\n")]));
        assert!(twice.iter().any(|finding| finding.what.starts_with("has the number")));
    }
}
