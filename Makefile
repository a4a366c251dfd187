# As root on Debian or Ubuntu, `make` installs what is missing: a Rust toolchain, a C compiler and, for tests, the programs to
# test against. Otherwise it says what to type, and skips the tests of missing programs.

.DEFAULT_GOAL := help
.PHONY: help bench bench-full test test-cluster test-vm fmt clean can-build can-test

# Where rustup puts cargo; a shell that was open before has it not in its PATH.
export PATH := $(PATH):$(HOME)/.cargo/bin

can-build:
	@contrib/toolchain.sh 2048 2048
can-test:
	@contrib/toolchain.sh 4096 10240

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

bench: can-build ## Build, measure every protocol on loopback in a minute, print the table and write the report (ARGS="--runs 5")
	cargo build --release --package blockmux
	"$${CARGO_TARGET_DIR:-target}/release/blockmux" bench $(ARGS)

bench-full: ## The same with eight jobs, both ceilings and longer runs: twelve minutes
	$(MAKE) bench ARGS="--full $(ARGS)"

test: can-test ## Everything that must hold before a change goes in
	cargo xtask install-peers
	cargo xtask ci

test-vm: can-test ## Tests with the Linux kernel as the peer, emulated (ARGS="iscsi" for one script of tests/vm)
	cargo xtask install-peers
	cargo xtask vm $(ARGS)

test-cluster: can-test ## Tests with a Ceph cluster, which is started on loopback (ARGS="resized" for some tests)
	cargo xtask cluster $(ARGS)

fmt: ## Format all sources
	cargo fmt --all
	cargo fmt --manifest-path fuzz/Cargo.toml

clean: ## Remove what was built
	cargo clean
	cargo clean --manifest-path fuzz/Cargo.toml
