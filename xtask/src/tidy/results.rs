//! Checks that the pages of `docs/results/` match their data files.

use super::{Finding, Tree};
use crate::results::{DATA, PAGES, pages};
use std::collections::BTreeMap;

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let in_folder =
        |path: &str, folder: &str| path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'));
    let data = tree.all().filter(|(path, _)| in_folder(path, DATA));
    let data: BTreeMap<String, String> =
        data.map(|(path, text)| (path.to_owned(), text.to_owned())).collect();
    if data.is_empty() {
        return Vec::new();
    }
    let made = match pages(&data) {
        Ok(made) => made,
        Err(error) => return vec![Finding::new(DATA, 1, format!("{error:#}"))],
    };
    let there = tree.ending(".md").filter(|(path, _)| in_folder(path, PAGES));
    let there: BTreeMap<&str, &str> = there.collect();
    let stale = made.iter().filter(|(path, text)| there.get(path.as_str()) != Some(&text.as_str()));
    let left_over = there.keys().filter(|path| !made.contains_key(**path));
    let paths = stale.map(|(path, _)| path.as_str()).chain(left_over.copied());
    paths.map(|path| Finding::new(path, 1, "does not match its data; run `cargo xtask results`")).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::tree;
    use super::*;

    #[test]
    fn a_page_that_differs_from_its_data_is_found() {
        let data = r#"{"title": "T", "machine": "M", "date": "d", "command": "c", "method": "m", "notes": [], "cells": []}"#;
        let path = "docs/results/data/t.json";
        let made = pages(&BTreeMap::from([(path.to_owned(), data.to_owned())])).unwrap();
        let (page, index) = (&made["docs/results/t.md"], &made["docs/results/README.md"]);
        let files =
            [(path, data), ("docs/results/README.md", index.as_str()), ("docs/results/t.md", page.as_str())];
        assert_eq!(check(&tree(&files)), []);
        assert_eq!(check(&tree(&files[..2]))[0].path, "docs/results/t.md", "it is missing");
        let mut more = files.to_vec();
        more.push(("docs/results/old.md", "# Old\n"));
        assert_eq!(check(&tree(&more))[0].path, "docs/results/old.md");
        assert_eq!(check(&tree(&[])), []);
    }
}
