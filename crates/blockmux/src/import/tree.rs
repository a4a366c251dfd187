//! Statements of text configs: words of one line, and the block behind them.
//!
//! SCST and ctld write blocks in braces, tgt in tags as Apache does, nbd-server in sections. All
//! become [`Statement`]s with the line of their beginning. Nesting and the number of statements are
//! limited, and no text makes a reader panic.

use zeroize::Zeroizing;

/// A line, with the statements of its block.
pub(super) struct Statement {
    /// The line in the file, from 1.
    pub(super) line: usize,
    /// At least one word. Words may be secrets.
    pub(super) words: Vec<Zeroizing<String>>,
    pub(super) below: Vec<Statement>,
    /// It has a block, which may be empty.
    pub(super) is_block: bool,
}

/// A text that does not follow its syntax.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SyntaxError {
    pub(super) line: usize,
    pub(super) what: String,
}

impl SyntaxError {
    fn new(line: usize, what: impl Into<String>) -> SyntaxError {
        SyntaxError { line, what: what.into() }
    }
}

impl Statement {
    /// The first word.
    pub(super) fn keyword(&self) -> &str {
        self.words.first().map_or("", |word| word.as_str())
    }

    /// The word with this number; 0 is the first one behind the keyword.
    pub(super) fn argument(&self, number: usize) -> Option<&str> {
        self.words.get(number + 1).map(|word| word.as_str())
    }

    /// All words behind the keyword.
    pub(super) fn arguments(&self) -> impl Iterator<Item = &str> {
        self.words.iter().skip(1).map(|word| word.as_str())
    }

    /// The words behind the keyword, joined.
    pub(super) fn value(&self) -> String {
        self.arguments().collect::<Vec<_>>().join(" ")
    }
}

/// Reads blocks in braces. A statement ends at the end of its line, at `;`, or where its block
/// begins; `#` begins a comment, and double quotes hold a word together.
pub(super) fn braces(text: &str) -> Result<Vec<Statement>, SyntaxError> {
    let mut tree = Tree::default();
    for (number, line) in text.lines().enumerate() {
        let at = number + 1;
        let mut words = Vec::new();
        for token in tokens(line, at, "{};")? {
            match token {
                Token::Word(word) => words.push(word),
                Token::Mark('{') if words.is_empty() => match tree.take_last_without_block() {
                    // The brace of a block may be in the next line.
                    Some(statement) => tree.open(statement)?,
                    None => return Err(SyntaxError::new(at, "a block has no name; remove its brace")),
                },
                Token::Mark('{') => tree.open(Statement::new(at, std::mem::take(&mut words)))?,
                Token::Mark(mark) => {
                    tree.push(at, &mut words)?;
                    if mark == '}' {
                        tree.close(at)?;
                    }
                }
            }
        }
        tree.push(at, &mut words)?;
    }
    tree.finish()
}

/// Reads blocks in tags, as `<target NAME>` and `</target>`. A line may be continued by a `\`, and
/// a `=` may be between a key and its value.
pub(super) fn tags(text: &str) -> Result<Vec<Statement>, SyntaxError> {
    let mut tree = Tree::default();
    for (at, line) in continued(text) {
        let line = line.trim();
        let tag = line.strip_prefix('<').and_then(|rest| rest.split_once('>'));
        match tag {
            Some((name, _)) if name.starts_with('/') => tree.close(at)?,
            Some((name, rest)) => {
                let mut words = words(name, at)?;
                // Tags of paths without a value end with a slash.
                if words.is_empty() {
                    return Err(SyntaxError::new(at, "a tag has no name; name it, as <target iqn.a>"));
                }
                tree.open(Statement::new(at, std::mem::take(&mut words)))?;
                tree.push(at, &mut self::words(rest, at)?)?;
            }
            None if line.starts_with('<') => {
                return Err(SyntaxError::new(at, "a tag does not end; write a > behind it"));
            }
            None => {
                let mut words = words(line, at)?;
                if words.get(1).is_some_and(|word| word.as_str() == "=") {
                    words.remove(1);
                }
                tree.push(at, &mut words)?;
            }
        }
    }
    tree.finish()
}

/// Reads sections, as `[generic]`, of `key = value`. The value is one word, with its blanks.
pub(super) fn sections(text: &str) -> Result<Vec<Statement>, SyntaxError> {
    let mut tree = Tree::default();
    for (number, line) in text.lines().enumerate() {
        let at = number + 1;
        let line = line.trim();
        if line.is_empty() || line.starts_with(['#', ';']) {
            continue;
        }
        if let Some(rest) = line.strip_prefix('[') {
            let Some((name, _)) = rest.split_once(']') else {
                return Err(SyntaxError::new(at, "the name of a section does not end; write a ] behind it"));
            };
            tree.close_all();
            tree.open(Statement::new(at, vec![Zeroizing::new(name.trim().to_owned())]))?;
            continue;
        }
        let Some((key, value)) = line.split_once('=') else {
            return Err(SyntaxError::new(at, "is neither a [section] nor key = value; correct the line"));
        };
        let words = [key.trim(), value.trim()].map(|word| Zeroizing::new(word.to_owned()));
        tree.push(at, &mut Vec::from(words))?;
    }
    tree.close_all();
    tree.finish()
}

/// Statements that are being read.
#[derive(Default)]
struct Tree {
    /// Statements of the innermost open block, or of the file.
    current: Vec<Statement>,
    /// Open blocks, each with the statements before it.
    open: Vec<(Vec<Statement>, Statement)>,
    count: usize,
}

impl Statement {
    fn new(line: usize, words: Vec<Zeroizing<String>>) -> Statement {
        Statement { line, words, below: Vec::new(), is_block: false }
    }
}

impl Tree {
    /// Adds a statement without a block, unless there are no words.
    fn push(&mut self, line: usize, words: &mut Vec<Zeroizing<String>>) -> Result<(), SyntaxError> {
        if !words.is_empty() {
            self.bound(line)?;
            self.current.push(Statement::new(line, std::mem::take(words)));
        }
        Ok(())
    }

    fn open(&mut self, statement: Statement) -> Result<(), SyntaxError> {
        self.bound(statement.line)?;
        if self.open.len() >= MAX_DEPTH {
            return Err(SyntaxError::new(statement.line, format!("more than {MAX_DEPTH} blocks are nested")));
        }
        let statement = Statement { is_block: true, ..statement };
        self.open.push((std::mem::take(&mut self.current), statement));
        Ok(())
    }

    fn close(&mut self, line: usize) -> Result<(), SyntaxError> {
        let Some((before, mut block)) = self.open.pop() else {
            return Err(SyntaxError::new(line, "ends a block that did not begin; remove it"));
        };
        block.below = std::mem::replace(&mut self.current, before);
        self.current.push(block);
        Ok(())
    }

    fn close_all(&mut self) {
        while !self.open.is_empty() {
            // It fails without an open block only.
            let _ = self.close(0);
        }
    }

    fn take_last_without_block(&mut self) -> Option<Statement> {
        self.current.pop_if(|last| !last.is_block)
    }

    fn bound(&mut self, line: usize) -> Result<(), SyntaxError> {
        self.count += 1;
        if self.count > MAX_STATEMENTS {
            return Err(SyntaxError::new(line, format!("there are more than {MAX_STATEMENTS} statements")));
        }
        Ok(())
    }

    fn finish(self) -> Result<Vec<Statement>, SyntaxError> {
        match self.open.last() {
            Some((_, block)) => {
                let what = format!("the block `{}` does not end", block.keyword());
                Err(SyntaxError::new(block.line, what))
            }
            None => Ok(self.current),
        }
    }
}

enum Token {
    Word(Zeroizing<String>),
    Mark(char),
}

/// The words of a line.
fn words(line: &str, at: usize) -> Result<Vec<Zeroizing<String>>, SyntaxError> {
    let tokens = tokens(line, at, "")?;
    let word = |token| if let Token::Word(word) = token { Some(word) } else { None };
    Ok(tokens.into_iter().filter_map(word).collect())
}

/// Splits a line into words and marks. A `#` at the beginning of a word begins a comment.
fn tokens(line: &str, at: usize, marks: &str) -> Result<Vec<Token>, SyntaxError> {
    let mut tokens = Vec::new();
    let mut rest = line.trim_start();
    while let Some(first) = rest.chars().next() {
        if first == '#' {
            break;
        }
        if marks.contains(first) {
            tokens.push(Token::Mark(first));
            rest = rest[first.len_utf8()..].trim_start();
            continue;
        }
        let end = word_end(rest, marks)
            .ok_or_else(|| SyntaxError::new(at, "a quoted text does not end; write a \" behind it"))?;
        let (quoted, behind) = rest.split_at(end);
        rest = behind.trim_start();
        tokens.push(Token::Word(unquoted(quoted)));
    }
    Ok(tokens)
}

/// The length of the word at the beginning of a text; `None` if a quoted part does not end.
fn word_end(text: &str, marks: &str) -> Option<usize> {
    let mut is_quoted = false;
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' if is_quoted => drop(chars.next()),
            '"' => is_quoted = !is_quoted,
            c if !is_quoted && (c.is_whitespace() || marks.contains(c)) => return Some(at),
            _ => {}
        }
    }
    (!is_quoted).then_some(text.len())
}

/// A word without its quotes. The text never grows, so that no copy of a secret is left in freed
/// memory.
fn unquoted(word: &str) -> Zeroizing<String> {
    let mut text = Zeroizing::new(String::with_capacity(word.len()));
    let mut is_quoted = false;
    let mut chars = word.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' if is_quoted => text.extend(chars.next()),
            '"' => is_quoted = !is_quoted,
            c => text.push(c),
        }
    }
    text
}

/// Lines with their numbers; a line that ends in `\` continues in the next one.
fn continued(text: &str) -> Vec<(usize, Zeroizing<String>)> {
    let mut lines: Vec<(usize, Zeroizing<String>)> = Vec::new();
    let mut is_open = false;
    for (number, line) in text.lines().enumerate() {
        let (line, continues) = match line.trim_end().strip_suffix('\\') {
            Some(line) => (line, true),
            None => (line, false),
        };
        match lines.last_mut().filter(|_| is_open) {
            Some((_, last)) => *last = Zeroizing::new(format!("{}{}", last.as_str(), line.trim_start())),
            None => lines.push((number + 1, Zeroizing::new(line.to_owned()))),
        }
        is_open = continues;
    }
    lines
}

/// Maximum depth of blocks; the formats nest four.
pub(super) const MAX_DEPTH: usize = 16;
/// Maximum number of statements of a file: tens of thousands of LUNs.
pub(super) const MAX_STATEMENTS: usize = 500_000;

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Statements as text: words joined by `,`, blocks in parentheses.
    pub(in crate::import) fn shown(statements: &[Statement]) -> String {
        let one = |statement: &Statement| {
            let words: Vec<_> = statement.words.iter().map(|word| word.as_str()).collect();
            let below = statement.is_block.then(|| format!("({})", shown(&statement.below)));
            format!("{}:{}{}", statement.line, words.join(","), below.unwrap_or_default())
        };
        statements.iter().map(one).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn blocks_in_braces_may_begin_in_the_next_line() {
        let text = "a b { c \"d e\" ; f } # x {\ng\n{\n  h \"\\\"}#\" i#j\n}\nk{}";
        assert_eq!(shown(&braces(text).unwrap()), "1:a,b(1:c,d e 1:f) 2:g(4:h,\"}#,i#j) 6:k()");
    }

    #[test]
    fn blocks_in_tags_hold_lines() {
        let text =
            "include x\n<target \"a b\">\n  k = v \\\n   w\n <lun /dev/x>\n </lun>\n</target> # end\n#<x\n";
        assert_eq!(shown(&tags(text).unwrap()), "1:include,x 2:target,a b(3:k,v,w 5:lun,/dev/x())");
    }

    #[test]
    fn sections_hold_keys_with_one_value() {
        let text = "# x\n[generic]\n a = b c # d\n\n[ x ]\n;y\nb=\n";
        assert_eq!(shown(&sections(text).unwrap()), "2:generic(3:a,b c # d) 5:x(7:b,)");
    }

    #[test]
    fn an_error_names_its_line() {
        let line = |read: Result<Vec<Statement>, SyntaxError>| read.err().map(|error| error.line);
        assert_eq!(line(braces("a {\nb {\n}\n")), Some(1));
        assert_eq!(line(braces("a\n}\n")), Some(2));
        assert_eq!(line(braces("\n{")), Some(2));
        assert_eq!(line(braces("a\n\"b")), Some(2));
        assert_eq!(line(braces(&"a {\n".repeat(1000))), Some(MAX_DEPTH + 1));
        assert_eq!(line(braces(&"a;".repeat(MAX_STATEMENTS + 1))), Some(1));
        assert_eq!(line(tags("<a>\n<b>\n</b>")), Some(1));
        assert_eq!((line(tags("</a>")), line(tags("x\n<a")), line(tags("< >"))), (Some(1), Some(2), Some(1)));
        assert_eq!((line(sections("[a\n")), line(sections("[a]\nb"))), (Some(1), Some(2)));
    }
}
