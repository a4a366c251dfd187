//! Comparison and combination of I/O memory.

use blockmux_volume::SgList;

/// Offset of the first difference of two lists, within the length of the shorter one.
pub(crate) fn first_difference(a: &SgList, b: &SgList) -> Option<usize> {
    let len = a.len().min(b.len());
    let (mut one, mut other) = ([0; PIECE], [0; PIECE]);
    for at in (0..len).step_by(PIECE) {
        let here = PIECE.min(len.saturating_sub(at));
        let (one, other) = (one.get_mut(..here)?, other.get_mut(..here)?);
        a.slice(at, here).copy_to(one);
        b.slice(at, here).copy_to(other);
        if one != other {
            let within = one.iter().zip(other.iter()).position(|(a, b)| a != b)?;
            return at.checked_add(within);
        }
    }
    None
}

/// The bitwise OR of both lists.
pub(super) fn or(a: &SgList, b: &SgList) -> Vec<u8> {
    let mut bytes = a.to_vec();
    bytes.iter_mut().zip(b.to_vec()).for_each(|(byte, other)| *byte |= other);
    bytes
}

/// Whether every byte is zero.
pub(super) fn is_zero(list: &SgList) -> bool {
    list.to_vec().iter().all(|&byte| byte == 0)
}

/// Number of bytes that are compared at once.
const PIECE: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::Seg;

    #[test]
    fn the_first_difference_is_found_in_every_piece() {
        let zeroes: SgList = Seg::from_slice(&[0; 10_000]).into();
        assert_eq!(first_difference(&zeroes, &zeroes), None);
        for at in [0, 1, 4095, 4096, 9999] {
            let mut bytes = [0; 10_000];
            bytes[at] = 1;
            assert_eq!(first_difference(&zeroes, &Seg::from_slice(&bytes).into()), Some(at));
        }
    }
}
