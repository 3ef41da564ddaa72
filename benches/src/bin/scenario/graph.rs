//! A graph of objects with growing lists (in the manner of espresso, which minimises sets of cubes): nodes come
//! and go, have labels of odd lengths and edge lists that realloc grows and shrinks; walks take lists of their own.

use crate::{Case, Outcome};
use thermalloc_benches::Random;

const NODES: usize = 20_000;

struct Node {
    label: Box<[u8]>,
    edges: Vec<u32>,
    weight: u64,
}

struct Graph {
    nodes: Vec<Option<Box<Node>>>,
    random: Random,
    ops: usize,
}

impl Graph {
    #[allow(clippy::cast_possible_truncation, reason = "below NODES")]
    fn any(&mut self) -> u32 {
        self.random.below(NODES) as u32
    }

    fn create(&mut self, id: u32) {
        let length = self.random.between(3, 60);
        let label = vec![id.to_le_bytes()[0] | 1; length].into_boxed_slice();
        let edges = (0..3).map(|_| self.any()).collect();
        self.ops += 3;
        self.nodes[id as usize] = Some(Box::new(Node { label, edges, weight: 1 }));
    }

    fn connect(&mut self, from: u32, to: u32) {
        let Some(node) = &mut self.nodes[from as usize] else {
            return self.create(from);
        };
        self.ops += usize::from(node.edges.len() == node.edges.capacity());
        node.edges.push(to);
        node.weight += 1;
    }

    /// Drops every second edge, and gives the room back.
    fn thin(&mut self, id: u32) {
        if let Some(node) = &mut self.nodes[id as usize] {
            let mut keep = false;
            node.edges.retain(|_| {
                keep = !keep;
                keep
            });
            node.edges.shrink_to_fit();
            self.ops += 1;
        }
    }

    /// Moves all edges of one node to another.
    fn merge(&mut self, into: u32, from: u32) {
        let Some(gone) = self.nodes[from as usize].take() else {
            return;
        };
        assert!(
            gone.label.iter().all(|b| *b == from.to_le_bytes()[0] | 1),
            "a label was overwritten"
        );
        if let Some(node) = &mut self.nodes[into as usize]
            && node.edges.len() < 1000
        {
            node.edges.extend_from_slice(&gone.edges);
            node.weight += gone.weight;
            self.ops += 1;
        }
    }

    /// The union of the neighbours' edges, sorted: lists that live for a moment.
    fn walk(&mut self, id: u32) -> u64 {
        let Some(node) = &self.nodes[id as usize] else {
            return 0;
        };
        let mut seen: Vec<u32> = Vec::new();
        for next in node.edges.iter().take(16) {
            if let Some(near) = &self.nodes[*next as usize] {
                self.ops += 1;
                seen.extend(near.edges.iter().take(16));
            }
        }
        seen.sort_unstable();
        seen.dedup();
        seen.iter().fold(0, |sum, n| sum.wrapping_mul(31) + u64::from(*n))
    }
}

pub fn graph(case: &Case) -> Outcome {
    let nodes = (0..NODES).map(|_| None).collect();
    let mut graph = Graph { nodes, random: Random::new(1), ops: 0 };
    let mut sum = 0_u64;
    for _ in 0..case.times(18_000_000) {
        let (a, b) = (graph.any(), graph.any());
        match graph.random.below(16) {
            0..6 => graph.connect(a, b),
            6..9 => graph.thin(a),
            9..11 => graph.merge(a, b),
            11..13 => graph.create(a),
            _ => sum = sum.wrapping_add(graph.walk(a)),
        }
    }
    std::hint::black_box(sum);
    Outcome::of(graph.ops)
}
