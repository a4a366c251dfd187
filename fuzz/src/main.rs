//! Every fuzz target under libFuzzer, in one program: the environment variable `FUZZ_TARGET` names
//! the one to run.
//!
//! `cargo xtask fuzz NAME` builds and runs this. The targets are in `targets/`.
#![no_main]

use blockmux_fuzz_targets::Target;
use std::sync::OnceLock;

libfuzzer_sys::fuzz_target!(
    init: {
        let name = std::env::var("FUZZ_TARGET").expect("FUZZ_TARGET names a fuzz target");
        let target = Target::find(&name).expect("FUZZ_TARGET is in the list of targets");
        TARGET.get_or_init(|| target);
    },
    |data: &[u8]| {
        let target = TARGET.get().expect("libFuzzer ran init first");
        (target.run)(data);
    }
);

static TARGET: OnceLock<&'static Target> = OnceLock::new();
