// libnvrtc.so.13: compiles by the simulator's nvcc, which lies beside it, and keeps the results on disk, so that each test program does
// not compile the same kernels again.

#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nvrtc.h>

struct _nvrtcProgram {
    std::string source, name, log, ptx;
};

namespace {

// The simulator's folder: this library is in its `lib`.
std::string home() {
    Dl_info info;
    dladdr(reinterpret_cast<void *>(&nvrtcCompileProgram), &info);
    char path[PATH_MAX];
    std::string library = realpath(info.dli_fname, path) ? path : info.dli_fname;
    for (int i = 0; i < 2; i++) {
        library.resize(library.rfind('/'));
    }
    return library;
}

std::string read(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
}

// Whole or not at all: other processes read it.
bool write(const std::string &path, const std::string &text) {
    const std::string scratch = path + "." + std::to_string(getpid());
    std::ofstream file(scratch, std::ios::binary);
    file << text;
    file.close();
    return file && rename(scratch.c_str(), path.c_str()) == 0;
}

// FNV-1a.
std::string hash(const std::string &text) {
    unsigned long long value = 0xcbf29ce484222325u;
    for (unsigned char c : text) {
        value = (value ^ c) * 0x100000001b3u;
    }
    char digits[17];
    snprintf(digits, sizeof digits, "%016llx", value);
    return digits;
}

// Runs a command; what it prints, and whether it has succeeded.
bool run(const std::string &command, std::string &output) {
    FILE *pipe = popen((command + " 2>&1").c_str(), "r");
    if (!pipe) {
        output = "cannot start " + command;
        return false;
    }
    char piece[4096];
    size_t length;
    while ((length = fread(piece, 1, sizeof piece, pipe)) > 0) {
        output.append(piece, length);
    }
    return pclose(pipe) == 0;
}

nvrtcResult compile(_nvrtcProgram &program) {
    const std::string folder = home(), cache = folder + "/cache";
    mkdir(cache.c_str(), 0777);
    // What the result depends on.
    const std::string key = program.source + read(folder + "/bin/nvcc") + read(folder + "/include/kernels.h");
    const std::string base = cache + "/" + hash(key);
    const std::string ptx = base + ".ptx";
    if (access(ptx.c_str(), R_OK) != 0) {
        const std::string source = base + "." + std::to_string(getpid()) + ".cu";
        if (!write(source, program.source)) {
            program.log = "cannot write " + source;
            return NVRTC_ERROR_INTERNAL_ERROR;
        }
        const bool compiled = run("'" + folder + "/bin/nvcc' --ptx -o '" + ptx + "' '" + source + "'", program.log);
        unlink(source.c_str());
        if (!compiled) {
            return NVRTC_ERROR_COMPILATION;
        }
    }
    program.ptx = read(ptx);
    return program.ptx.empty() ? NVRTC_ERROR_INTERNAL_ERROR : NVRTC_SUCCESS;
}

} // namespace

extern "C" {

nvrtcResult nvrtcVersion(int *major, int *minor) {
    *major = 13;
    *minor = 0;
    return NVRTC_SUCCESS;
}

const char *nvrtcGetErrorString(nvrtcResult result) {
    return result == NVRTC_SUCCESS             ? "NVRTC_SUCCESS"
           : result == NVRTC_ERROR_COMPILATION ? "NVRTC_ERROR_COMPILATION"
                                               : "NVRTC_ERROR of the CUDA simulator";
}

nvrtcResult nvrtcCreateProgram(nvrtcProgram *program, const char *source, const char *name, int num_headers,
                               const char *const *, const char *const *) {
    if (num_headers != 0) {
        fputs("CUDA simulator: nvrtcCreateProgram takes no headers\n", stderr);
        return NVRTC_ERROR_INVALID_INPUT;
    }
    *program = new _nvrtcProgram{source, name ? name : "", "", ""};
    return NVRTC_SUCCESS;
}

nvrtcResult nvrtcDestroyProgram(nvrtcProgram *program) {
    delete *program;
    *program = nullptr;
    return NVRTC_SUCCESS;
}

// Options say how a GPU rounds, which the host does anyway; of others nothing is known here.
nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int num_options, const char *const *options) {
    for (int i = 0; i < num_options; i++) {
        bool known = false;
        for (const char *prefix : {"--gpu-architecture=", "--fmad=false", "--prec-div=true", "--prec-sqrt=true",
                                   "--ftz=false", "--std=c++17", "--device-as-default-execution-space"}) {
            known = known || strncmp(options[i], prefix, strlen(prefix)) == 0;
        }
        if (!known) {
            program->log = std::string("the CUDA simulator does not know the option ") + options[i];
            return NVRTC_ERROR_INVALID_OPTION;
        }
    }
    return compile(*program);
}

nvrtcResult nvrtcGetPTXSize(nvrtcProgram program, size_t *size) {
    *size = program->ptx.size() + 1;
    return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetPTX(nvrtcProgram program, char *ptx) {
    memcpy(ptx, program->ptx.c_str(), program->ptx.size() + 1);
    return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, size_t *size) {
    *size = program->log.size() + 1;
    return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char *log) {
    memcpy(log, program->log.c_str(), program->log.size() + 1);
    return NVRTC_SUCCESS;
}

} // extern "C"
