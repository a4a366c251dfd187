//! The smoke run: mutates a target's corpus for a while. It needs no nightly toolchain and measures
//! no coverage, so it finds only bugs near the corpus. Its inputs depend only on the seed and the
//! given time.
//!
//! Usage: `smoke NAME SECONDS CORPUS ARTIFACTS`, the latter two directories.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program that reports to a terminal")]

use blockmux_fuzz_targets::Target;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use std::{env, fs, io, panic};

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [name, seconds, corpus, artifacts] = arguments.as_slice() else {
        eprintln!("usage: smoke NAME SECONDS CORPUS ARTIFACTS");
        return ExitCode::from(2);
    };
    let (Some(target), Ok(seconds)) = (Target::find(name), seconds.parse()) else {
        eprintln!("there is no fuzz target {name}, or {seconds} is not a number of seconds");
        return ExitCode::from(2);
    };
    match smoke(target, Duration::from_secs(seconds), Path::new(corpus), Path::new(artifacts)) {
        Ok(Outcome::Held { runs }) => {
            println!("{name}: {runs} inputs");
            ExitCode::SUCCESS
        }
        Ok(Outcome::Broken { input }) => {
            println!("{name}: panicked, the input is in {}", input.display());
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{name}: {error}");
            ExitCode::FAILURE
        }
    }
}

enum Outcome {
    Held { runs: u64 },
    Broken { input: PathBuf },
}

/// Runs `target` on mutated inputs until `time` is over or one panics.
fn smoke(target: &Target, time: Duration, corpus: &Path, artifacts: &Path) -> io::Result<Outcome> {
    let mut seeds = Vec::new();
    for entry in fs::read_dir(corpus)? {
        seeds.push(fs::read(entry?.path())?);
    }
    seeds.sort();
    seeds.push(Vec::new());
    let (deadline, mut random) = (Instant::now() + time, Random(SEED));
    for runs in 0.. {
        if Instant::now() >= deadline {
            return Ok(Outcome::Held { runs });
        }
        let input = random.mutated(&seeds);
        if panic::catch_unwind(|| (target.run)(&input)).is_err() {
            fs::create_dir_all(artifacts)?;
            let path = artifacts.join(format!("smoke-{runs}"));
            fs::write(&path, &input)?;
            return Ok(Outcome::Broken { input: path });
        }
    }
    unreachable!("the clock reaches the deadline before a 64-bit counter ends")
}

/// SplitMix64: small, and good enough to choose bytes.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`, which must not be zero.
    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// One seed, or the beginning of one and the end of another, with a few changes.
    fn mutated(&mut self, seeds: &[Vec<u8>]) -> Vec<u8> {
        let mut input = seeds[self.below(seeds.len())].clone();
        if self.below(4) == 0 {
            let other = &seeds[self.below(seeds.len())];
            input.truncate(self.below(input.len() + 1));
            input.extend_from_slice(&other[self.below(other.len() + 1)..]);
        }
        for _ in 0..=self.below(8) {
            self.change(&mut input);
        }
        input.truncate(MAX_INPUT);
        input
    }

    fn change(&mut self, input: &mut Vec<u8>) {
        let (kind, at) = (self.below(6), self.below(input.len() + 1));
        match kind {
            0 => input.insert(at, self.next() as u8),
            1 => {
                let bytes: Vec<u8> = (0..self.below(16)).map(|_| self.next() as u8).collect();
                input.splice(at..at, bytes);
            }
            2 => {
                let end = (at + self.below(16)).min(input.len());
                input.drain(at..end);
            }
            3 => {
                let end = (at + self.below(64)).min(input.len());
                let copy = input[at..end].to_vec();
                input.splice(end..end, copy);
            }
            _ => {
                let edge = EDGES[self.below(EDGES.len())];
                let flip = 1 << self.below(8);
                if let Some(byte) = input.get_mut(at) {
                    *byte = if kind == 4 { edge } else { *byte ^ flip };
                }
            }
        }
    }
}

/// Bytes at the edges of lengths and flags.
const EDGES: [u8; 8] = [0, 1, 2, 0x7f, 0x80, 0xfe, 0xff, 0x40];

/// Maximum length of an input, in bytes.
const MAX_INPUT: usize = 4096;

/// Seed of the random numbers, a constant, so that a failure is reproducible.
const SEED: u64 = 0x626c_6f63_6b6d_7578;
