//! The text of the kernel's tables of mounts.

/// A word of the kernel's tables of mounts, in which spaces and the like are octal.
pub(super) fn unescaped(word: &str) -> String {
    let mut text = Vec::with_capacity(word.len());
    let mut rest = word.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|_| first == b'\\').and_then(|digits| {
            let digits = std::str::from_utf8(digits).ok()?;
            u8::from_str_radix(digits, 8).ok()
        });
        text.push(octal.unwrap_or(first));
        rest = if octal.is_some() { &after[3..] } else { after };
    }
    String::from_utf8_lossy(&text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_as_the_kernel_writes_them() {
        assert_eq!(unescaped("/mnt/two\\040words\\134x"), "/mnt/two words\\x");
        assert_eq!(unescaped("/mnt\\04"), "/mnt\\04");
        assert_eq!(unescaped(""), "");
    }
}
