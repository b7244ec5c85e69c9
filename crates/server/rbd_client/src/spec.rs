//! The name of an image: `rbd:POOL/[NAMESPACE/]IMAGE[@SNAPSHOT]`.

use std::fmt;
use std::str::FromStr;

const SCHEME: &str = "rbd:";

/// An image in a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdSpec {
    /// The pool.
    pub pool: String,
    /// The namespace in the pool; empty: the default one.
    pub namespace: String,
    /// The image.
    pub image: String,
    /// The snapshot; `None`: the image itself.
    pub snapshot: Option<String>,
}

/// Why a text names no image.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{text}' names no RBD image: {problem}; write rbd:POOL/IMAGE, rbd:POOL/NAMESPACE/IMAGE, or add @SNAPSHOT"
)]
pub struct SpecError {
    text: String,
    problem: &'static str,
}

impl RbdSpec {
    /// Whether a text begins like the name of an RBD image. Such a text is not taken for a path.
    #[must_use]
    pub fn is_meant(text: &str) -> bool {
        text.starts_with(SCHEME)
    }
}

impl FromStr for RbdSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let wrong = |problem| SpecError { text: text.to_owned(), problem };
        let rest = text.strip_prefix(SCHEME).ok_or_else(|| wrong("it does not begin with rbd:"))?;
        if rest.bytes().any(|byte| byte.is_ascii_control()) {
            return Err(wrong("it has a control character"));
        }
        let (path, snapshot) = match rest.split_once('@') {
            Some((_, snapshot)) if snapshot.is_empty() || snapshot.contains(['@', '/']) => {
                return Err(wrong("the snapshot after @ is empty or has @ or /"));
            }
            Some((path, snapshot)) => (path, Some(snapshot.to_owned())),
            None => (rest, None),
        };
        let parts: Vec<&str> = path.split('/').collect();
        if parts.iter().any(|part| part.is_empty()) {
            return Err(wrong("a part of it is empty"));
        }
        let (pool, namespace, image) = match parts.as_slice() {
            [pool, image] => (*pool, "", *image),
            [pool, namespace, image] => (*pool, *namespace, *image),
            _ => return Err(wrong("it needs a pool and an image")),
        };
        let [pool, namespace, image] = [pool, namespace, image].map(str::to_owned);
        Ok(Self { pool, namespace, image, snapshot })
    }
}

impl fmt::Display for RbdSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/", self.pool)?;
        if !self.namespace.is_empty() {
            write!(f, "{}/", self.namespace)?;
        }
        f.write_str(&self.image)?;
        self.snapshot.iter().try_for_each(|snapshot| write!(f, "@{snapshot}"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parts(text: &str) -> (String, String, String, Option<String>) {
        let RbdSpec { pool, namespace, image, snapshot } = text.parse().unwrap();
        (pool, namespace, image, snapshot)
    }

    #[test]
    fn name_is_split_into_pool_namespace_image_and_snapshot() {
        let own = |text: &str| text.to_owned();
        assert_eq!(parts("rbd:rbd/vm1"), (own("rbd"), own(""), own("vm1"), None));
        assert_eq!(parts("rbd:p/n/i@s"), (own("p"), own("n"), own("i"), Some(own("s"))));
    }

    #[test]
    fn mistake_is_named_with_the_forms_there_are() {
        for (text, part) in [
            ("rbd:", "is empty"),
            ("rbd:pool", "needs a pool and an image"),
            ("rbd:pool/", "is empty"),
            ("rbd:a/b/c/d", "needs a pool and an image"),
            ("rbd:pool/image@", "the snapshot after @"),
            ("rbd:pool/image@a@b", "the snapshot after @"),
            ("rbd:pool/im\0age", "control character"),
        ] {
            let error = text.parse::<RbdSpec>().unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("rbd:POOL/IMAGE"), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn name_stays_as_it_was(text in "rbd:[a-z./@-]{0,30}") {
            if let Ok(spec) = text.parse::<RbdSpec>() {
                prop_assert_eq!(spec.to_string(), text);
            }
        }
    }
}
