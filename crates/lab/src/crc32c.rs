//! CRC-32C (Castagnoli; RFC 3720 appendix B.4), eight bytes at a step through eight tables.

/// The CRC-32C of `bytes`.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0_u32;
    let (words, rest) = bytes.as_chunks::<8>();
    for word in words {
        let mixed = u64::from_le_bytes(*word) ^ u64::from(crc);
        crc = mixed
            .to_le_bytes()
            .iter()
            .enumerate()
            .fold(0, |sum, (i, &byte)| sum ^ TABLES[7 - i][usize::from(byte)]);
    }
    for &byte in rest {
        crc = TABLES[0][usize::from(crc as u8 ^ byte)] ^ (crc >> 8);
    }
    !crc
}

/// `TABLES[n][byte]`: what `byte` followed by `n` zero bytes adds to the remainder.
static TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc >> 1) ^ (POLYNOMIAL & (crc & 1).wrapping_neg());
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut entry = 256;
    while entry < 8 * 256 {
        let before = tables[entry / 256 - 1][entry % 256];
        tables[entry / 256][entry % 256] = tables[0][(before & 0xff) as usize] ^ (before >> 8);
        entry += 1;
    }
    tables
}

/// Castagnoli's, bits reversed.
const POLYNOMIAL: u32 = 0x82f6_3b78;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_examples_of_rfc_3720_come_out() {
        let ascending: Vec<u8> = (0..32).collect();
        let descending: Vec<u8> = (0..32).rev().collect();
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&ascending), 0x46dd_794e);
        assert_eq!(crc32c(&descending), 0x113f_db5c);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(b""), 0);
    }

    proptest! {
        #[test]
        fn eight_at_a_step_is_the_same_as_bit_by_bit(bytes: Vec<u8>) {
            let mut crc = !0_u32;
            for &byte in &bytes {
                crc ^= u32::from(byte);
                for _ in 0..8 {
                    crc = if crc & 1 == 1 { (crc >> 1) ^ POLYNOMIAL } else { crc >> 1 };
                }
            }
            prop_assert_eq!(crc32c(&bytes), !crc);
        }
    }
}
