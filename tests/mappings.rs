//! Few mappings: a process may have 65,530 of them, and an allocator must not be what uses them up.

#[global_allocator]
static GLOBAL: thermalloc::Thermalloc = thermalloc::Thermalloc;

fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").expect("/proc is mounted").lines().count()
}

/// Blocks of sizes from 1.1 to 3 MiB, one page of each touched, every second one freed and purged.
#[test]
fn ten_thousand_large_blocks_are_few_mappings() {
    let mut blocks: Vec<Vec<u8>> = (0..10_000usize)
        .map(|i| {
            let mut block = Vec::with_capacity((11 << 20) / 10 + (i * 7919) % (2 << 20));
            block.push(1);
            block
        })
        .collect();
    assert!(mappings() < 2000, "{} mappings with all live", mappings());
    let mut i = 0;
    blocks.retain(|_| {
        i += 1;
        i % 2 == 0
    });
    thermalloc::api::trim();
    assert!(mappings() < 2000, "{} mappings with half of them purged", mappings());
    // Growing moves blocks by mremap, which costs mappings: only so many are moved in that way.
    for block in &mut blocks {
        block.reserve_exact(4 << 20);
        assert_eq!(block[0], 1);
    }
    assert!(mappings() < 2000, "{} mappings after all have grown", mappings());
}
