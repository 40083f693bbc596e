"""The compiler of the backend, which does nothing because kernels are interpreted."""

from triton.backends.compiler import BaseBackend


class NoCompiler(BaseBackend):
    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "interpreted"

    def parse_options(self, options):
        return options

    def add_stages(self, stages, options, language=None):
        raise RuntimeError("kernels are interpreted: set TRITON_INTERPRET=1")

    def load_dialects(self, context):
        pass

    def get_module_map(self):
        return {}
