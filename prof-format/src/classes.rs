//! Rules that assign blocks to components by functions on their stack, by files, and by what TensorFlow
//! says. The built-in rules are `classes.txt`, whose head says how a rule is written; a user's file goes before
//! them.
use crate::component;

/// The text of the rules that are built in.
pub const BUILT_IN: &str = include_str!("../classes.txt");

/// What a rule looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Symbol,
    Module,
    Op,
    Region,
}

/// One rule.
#[derive(Clone, Copy, Debug)]
struct Rule<'a> {
    component: u8,
    kind: Kind,
    pattern: &'a str,
}

/// A line of a file of rules that is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadRule<'a> {
    /// Its number in the file, from 1.
    pub line: usize,
    /// What it says.
    pub text: &'a str,
}

/// The rules in force. A rule has an index: the lower one wins.
#[derive(Clone, Copy, Debug)]
pub struct Classes<'a> {
    user: &'a str,
}

impl<'a> Classes<'a> {
    /// The rules of a user's file (which may be empty), then those that are built in.
    ///
    /// # Errors
    /// The first line of the user's file that is neither a rule nor a comment.
    pub fn new(user: &'a str) -> Result<Self, BadRule<'a>> {
        for (i, text) in user.lines().enumerate() {
            if !is_comment(text) && parse(text).is_none() {
                return Err(BadRule { line: i + 1, text });
            }
        }
        Ok(Self { user })
    }

    fn rules(self) -> impl Iterator<Item = Rule<'a>> {
        self.user.lines().chain(BUILT_IN.lines()).filter_map(parse)
    }

    /// The index of the first rule that a frame fulfils: the name of its function, and the path of the
    /// file that it is in. A stack's rule is the lowest of its frames' indices.
    #[must_use]
    pub fn of_frame(self, symbol: &str, module: &str) -> Option<usize> {
        self.rules().position(|rule| match rule.kind {
            Kind::Symbol => matches(rule.pattern, symbol),
            Kind::Module => matches(rule.pattern, module),
            Kind::Op | Kind::Region => false,
        })
    }

    /// The component of what TensorFlow says: the operator's name and the region.
    #[must_use]
    pub fn of_annotation(self, op: &str, region: &str) -> Option<u8> {
        let rule = self.rules().find(|rule| match rule.kind {
            Kind::Op => matches(rule.pattern, op),
            Kind::Region => matches(rule.pattern, region),
            Kind::Symbol | Kind::Module => false,
        });
        rule.map(|rule| rule.component)
    }

    /// The component that the rule of this index assigns.
    #[must_use]
    pub fn component(self, index: usize) -> u8 {
        self.rules().nth(index).map_or(component::UNKNOWN, |rule| rule.component)
    }
}

fn is_comment(line: &str) -> bool {
    let line = line.trim();
    line.is_empty() || line.starts_with('#')
}

fn parse(line: &str) -> Option<Rule<'_>> {
    if is_comment(line) {
        return None;
    }
    let (component, rest) = line.trim().split_once(char::is_whitespace)?;
    let (kind, pattern) = rest.trim_start().split_once(':')?;
    let kind = match kind {
        "symbol" => Kind::Symbol,
        "module" => Kind::Module,
        "op" => Kind::Op,
        "region" => Kind::Region,
        _ => return None,
    };
    let component = component::find(component.as_bytes()).filter(|&c| c != component::UNKNOWN)?;
    (!pattern.is_empty()).then_some(Rule { component, kind, pattern })
}

/// Whether a pattern, in which a `*` stands for any text, is all of `text`.
fn matches(pattern: &str, text: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(mut text) = text.strip_prefix(first) else { return false };
    let mut parts = rest.split('*').peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return text.ends_with(part);
        }
        match text.find(part) {
            Some(at) => text = text.get(at + part.len()..).unwrap_or(""),
            None => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_stack(classes: Classes<'_>, stack: &[(&str, &str)]) -> &'static str {
        let rule =
            stack.iter().filter_map(|(symbol, module)| classes.of_frame(symbol, module)).min();
        component::NAMES[usize::from(rule.map_or(0, |rule| classes.component(rule)))]
    }

    #[test]
    fn every_line_that_is_built_in_is_a_rule() {
        assert!(Classes::new(BUILT_IN).is_ok());
        let rules = BUILT_IN.lines().filter(|line| !is_comment(line)).count();
        assert_eq!(Classes::new("").unwrap().rules().count(), rules);
        assert!(rules > 80);
    }

    #[test]
    fn patterns() {
        for (pattern, text) in [
            ("abc", "abc"),
            ("*", ""),
            ("*", "abc"),
            ("a*", "a"),
            ("a*c", "abc"),
            ("*b*", "abc"),
            ("a*b*c", "a-b-b-c"),
            ("a*bc", "abcbc"),
            ("a**c", "ac"),
        ] {
            assert!(matches(pattern, text), "{pattern} {text}");
        }
        for (pattern, text) in [
            ("abc", "abcd"),
            ("a*", "ba"),
            ("a*a", "a"),
            ("*b", "abc"),
            ("a*b*c", "acb"),
            ("", "a"),
        ] {
            assert!(!matches(pattern, text), "{pattern} {text}");
        }
    }

    #[test]
    fn stacks_of_frameworks() {
        let classes = Classes::new("").unwrap();
        let tf = "/x/libtensorflow_cc.so.2";
        let python = ("_PyEval_EvalFrameDefault", "/usr/bin/python3.11");
        let kernel = ("tensorflow::MatMulOp<float>::Compute(tensorflow::OpKernelContext*)", tf);
        let stacks: [(&str, &[(&str, &str)]); 7] = [
            ("workspace", &[("dnnl::impl::malloc(unsigned long, int)", tf), kernel, python]),
            (
                "workspace",
                &[
                    (
                        "Eigen::internal::TensorContractionBlockMemAllocator<float, float>::allocate<Eigen::ThreadPoolDevice>()",
                        tf,
                    ),
                    kernel,
                ],
            ),
            (
                "activations",
                &[("tsl::CPUAllocator::AllocateRaw(unsigned long)", tf), kernel, python],
            ),
            ("framework", &[("google::protobuf::Arena::Allocate", tf), kernel, python]),
            ("python", &[("_PyObject_Malloc", "/usr/bin/python3.11"), python]),
            ("other", &[("_dl_map_object", "/lib64/ld-linux-x86-64.so.2")]),
            ("unknown", &[("main", "/usr/bin/redis-server")]),
        ];
        for (component, stack) in stacks {
            assert_eq!(of_stack(classes, stack), component, "{stack:?}");
        }
    }

    #[test]
    fn what_tensorflow_says() {
        let classes = Classes::new("").unwrap();
        let of =
            |op, region| component::NAMES[usize::from(classes.of_annotation(op, region).unwrap())];
        assert_eq!(of("functional_1/conv_b_1/Relu", "output"), "activations");
        assert_eq!(of("functional_1/conv_b_1/Conv2D", "temp"), "workspace");
        assert_eq!(of("gradient_tape/functional_1/Conv2DBackpropFilter", "temp"), "gradients");
        assert_eq!(of("adam/Square_8", "output"), "optimizer");
        assert_eq!(of("checkpoint/RestoreV2", "output"), "weights");
    }

    #[test]
    fn a_users_rules_go_first_and_bad_ones_are_named() {
        let classes =
            Classes::new("# mine\n\nkv_cache  symbol:serve::*\nworkspace op:mine*\n").unwrap();
        let stack = [("malloc", "libc"), ("serve::Cache::grow", "/bin/serve"), ("dnnl_x", "")];
        assert_eq!(of_stack(classes, &stack), "kv_cache");
        assert_eq!(classes.of_annotation("mine/x", "output"), Some(component::WORKSPACE));
        for (text, line) in [
            ("weights symbol:a\nnothing symbol:b", 2),
            ("weights", 1),
            ("weights a*", 1),
            ("weights file:a", 1),
            ("weights symbol:", 1),
            ("unknown symbol:a", 1),
        ] {
            assert_eq!(Classes::new(text).unwrap_err().line, line, "{text}");
        }
    }
}
